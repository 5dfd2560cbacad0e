"""Peak memory while generating stays within the experts' budget plus everything else of the
model.
"""

from __future__ import annotations

import json
from pathlib import Path

import fresh_process
import pytest
import torch
from lab.bench import tiny_model
from native_kernel import skip_without_kernel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from multirate.experts.pack import pack

SCRIPT = """
import json, sys
from multirate.engine import attach

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

# imports are not the model's memory
import multirate.experts.model, transformers.models.qwen3_moe.modeling_qwen3_moe
import torch; torch.zeros(64, 64).bfloat16() @ torch.zeros(64, 64).bfloat16()
before = memory("VmRSS")
name, store, budget, backend = sys.argv[1:5]
engine = attach(name, experts=store, expert_memory=int(budget), backend=backend)
tokens = engine.generate([list(range(3, 30))], stop=engine.stopping(12)).sequences[0]
print(json.dumps({"grown": memory("VmHWM") - before, "tokens": tokens}))
"""


@pytest.mark.parametrize(("backend", "layout"), [("native", "native"), ("hf", "module")])
def test_peak_memory(backend: str, layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=261,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=512,
        num_experts=24,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path)
    tiny_model.tokenizer().save_pretrained(tmp_path)
    index = pack(tmp_path, tmp_path / "store", layout=layout)
    experts, budget = index.data_bytes, 12 * index.record.bytes
    resident = sum(p.numel() * 2 for name, p in model.named_parameters() if ".experts." not in name)
    del model
    if backend == "native":
        skip_without_kernel()
    done = fresh_process.run(SCRIPT, str(tmp_path), str(tmp_path / "store"), str(budget), backend)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["tokens"]
    # packed copies double the resident part on the native kernel; the rest is activations and
    # libraries' own buffers
    allowed = budget + 2 * resident + (72 << 20)
    grown = seen["grown"]
    assert grown < allowed < experts, (
        f"{grown / 1e6:.0f} MB of {allowed / 1e6:.0f}, experts {experts / 1e6:.0f} MB"
    )
