"""Models that read images, too: their language model is run, and calls with images are left to
their own loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import multirate
from multirate.decoding.stopping import StopSettings
from multirate.loading.hub import load_model, load_tokenizer

IMAGE = 5  # the token that stands for a patch of an image
TOLD: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    text = LlamaConfig(
        vocab_size=load_tokenizer("tiny")[1],
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=IMAGE, vision_feature_layer=-1
    )
    made = LlavaForConditionalGeneration(config).eval()
    for parameter in made.parameters():
        parameter.data.mul_(4)
    return made


def test_a_folder_of_it_is_loaded_for_text(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    load_tokenizer("tiny")[0].save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    assert type(loaded.model) is LlavaForConditionalGeneration
    prompt = [7, 9, 11, 13, 7, 9]
    text = model.generate(torch.tensor([prompt]), **TOLD)[0, len(prompt) :].tolist()
    engine = multirate.attach(loaded)
    for method in ("autoregressive", "prompt_lookup"):
        output = engine.generate([prompt], stop=StopSettings(12), method=method)
        assert output.sequences[0] == text


def test_calls_with_images_are_left_to_its_own_loop(model: Any) -> None:
    ids = torch.tensor([[7, *[IMAGE] * 4, 9, 11]])
    generate = multirate.custom_generate(method="prompt_lookup")
    texts = []
    for image in (torch.randn(1, 3, 28, 28), torch.zeros(1, 3, 28, 28)):
        inputs = {"input_ids": ids, "pixel_values": image, **TOLD}
        texts.append(model.generate(**inputs).tolist())
        with pytest.warns(UserWarning, match="multirate does not speed up this call"):
            assert model.generate(**inputs, custom_generate=generate).tolist() == texts[-1]
    assert texts[0] != texts[1]
