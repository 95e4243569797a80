"""Write a model as a Hugging Face folder, whole or sharded."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import nn

from infra import dist
from infra.digests import LIST, format_list, list_files
from infra.lines import remove
from infra.tokenizer import Tokenizer, read_if_there
from infra.weights import WEIGHT_FILES
from settings.loader import encodable


def export(model: nn.Module, source: Path, folder: Path, texts: dict[str, str] | None = None) -> None:
    """Write a Hugging Face folder: the weights, and everything else (config, tokenizer, template) as in
    `source`, except the files in `texts` (prompted_files).

    All ranks of a sharded model must call it; rank 0 writes.
    """
    with replace_folder(folder) as fresh:
        if dist.is_first():
            for path in source.iterdir():
                copied = path.suffix in (".json", ".jinja", ".txt", ".model")
                if copied and path.is_file() and path.name not in WEIGHT_FILES:
                    shutil.copyfile(path, fresh / path.name)
            for name, text in (texts or {}).items():
                (fresh / name).write_text(encodable(text), encoding="utf-8")
        save_weights(model, fresh)


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to write in, which then replaces `folder`, or the one that it links to. Rank 0 makes it
    and moves it."""
    folder = Path(os.path.realpath(folder))
    fresh = folder.with_name(f"{folder.name}.unfinished")
    if dist.is_first():
        remove(fresh)
        fresh.mkdir(parents=True)
    try:
        yield fresh
    except SafetensorError as error:  # its own name for an error of the file system
        raise OSError(None, f"{error}", f"{fresh}") from None
    if dist.is_first():
        (fresh / LIST).write_text(format_list(list_files(fresh, 0)))
        remove(folder)
        fresh.rename(folder)


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write safetensors in the dtype that config.json names, sharded with an index above 5 GB."""
    tensors = {}
    for name, t in model.named_hf_tensors():
        tensor = dist.gather_full(t)
        if dist.is_first():
            # A gathered tensor may be a view of padded memory, hence the copy.
            tensors[name] = tensor.to("cpu", model.shape.dtype, copy=True)
    if dist.is_first():
        save_torch_state_dict(tensors, folder)
        for path in folder.glob("*.safetensors"):  # safetensors lets only the owner read them
            shutil.copymode(folder / "config.json", path)


# ---- what an export is prompted by

def prompted_files(tokenizer: Tokenizer, system: str | None) -> dict[str, str]:
    """Write the files by which an exported model is prompted and ends its answers as here: name -> text.

    The template has `system` and data.template for those who give none of their own.
    """
    files = {}
    if tokenizer.own_template or tokenizer.plain is not None or system or tokenizer.arguments:
        files["chat_template.jinja"] = whole_template(tokenizer, system)
    path = tokenizer.folder / "generation_config.json"
    said = read_if_there(path)
    ends = said.get("eos_token_id")
    if tokenizer.eos_ids != set(ends if isinstance(ends, list) else [ends]):
        said["eos_token_id"] = sorted(tokenizer.eos_ids)
        files[path.name] = json.dumps(said, indent=2) + "\n"
    return files


def whole_template(tokenizer: Tokenizer, system: str | None) -> str:
    """Write a template that renders a question as `render` does."""
    if tokenizer.plain is not None:
        parts = tokenizer.plain.format(question="\0").split("\0")
        start = tokenizer.decode(tokenizer.begin, special=True)
        if not parts[0].startswith(start):
            parts[0] = start + parts[0]
        return "{{ messages[0]['content'] }}".join(f"{{{{ {literal(part)} }}}}" for part in parts)
    text = ""
    for name, value in tokenizer.arguments.items():
        text += f"{{% if {name} is not defined %}}{{% set {name} = {literal(value)} %}}{{% endif %}}"
    if system:
        first = f"[{{'role': 'system', 'content': {literal(system)}}}]"
        text += (f"{{% if messages[0]['role'] != 'system' %}}{{% set messages = {first} + messages %}}"
                 "{% endif %}")
    return text + tokenizer.source


def literal(value: object) -> str:
    """Write a value as jinja does."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
