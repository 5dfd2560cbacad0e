"""Lossless speed-up of this accelerator's base model: the text is the model's own,
sooner.

model.generate(**inputs, custom_generate="<this folder or its hub id>", trust_remote_code=True)
Further arguments: backend="auto" | "hf" | "native", speculate="auto" | "always" | "never"; and,
where the accelerator is calibrated, mode="dynamic" with quality=0.99 (lossy: that share of the
tokens is the model's).
"""


def generate(model, **arguments):
    from multirate.integration import generate_from_folder

    return generate_from_folder(model, **arguments)
