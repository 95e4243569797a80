"""Make the shipped models, and the problems that they are for (toy_tasks.py).

    python experiments/toy_models.py toy hard talk    # `make toy`: 20, 2 and 1 minutes on one core
    python experiments/toy_models.py long_sums        # the court's testbed: 9 minutes
    python experiments/toy_models.py teacher          # of compare_opd.py, into runs/: 3 minutes

Problems and tokenizers come out the same, byte for byte; weights differ with the machine. MODELS says how
each model is trained. They have 0.5M to 0.9M parameters in Qwen2's format, and do rarely what reinforcement
learning then teaches them to do: the toy guesses two thirds of its answers, hard and long_sums end training
early, and talk asks the right thing about half of the time.
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers
from toy_tasks import ROOT, hard_texts, long_sums_texts, splits, talk_texts, teacher_texts, toy_texts, write
from tqdm import trange

sys.path.insert(0, str(ROOT))

import model as decoder  # noqa: E402
from data import Tokenizer  # noqa: E402
from infra import dist  # noqa: E402
from infra.export import save_weights  # noqa: E402
from infra.terminal import new_parser  # noqa: E402
from records import Segments  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu",
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "torch_dtype": "float32",
}
WARMUP = 50  # batches


class Model(NamedTuple):
    """How a model is trained. The rate falls to 0 over `batches`; training ends early at `stop`."""

    folder: str
    texts: Callable[[], Iterator[tuple[str, str]]]
    batches: int
    batch_size: int
    lr: float
    stop: int
    layers: int = 4
    goes_on: bool = False  # from the toy's weights


MODELS = {
    "toy": Model("toy/model", toy_texts, 1300, 160, 2e-3, 1300),
    "hard": Model("toy/hard_model", hard_texts, 1000, 48, 3e-3, 600),
    "talk": Model("toy/talk_model", talk_texts, 400, 48, 1e-3, 400, goes_on=True),
    "teacher": Model("runs/teacher", teacher_texts, 1000, 48, 3e-3, 1000),
    "long_sums": Model("experiments/long_sums/model", long_sums_texts, 1000, 48, 4e-3, 800, layers=2),
}


def build_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE with all 256 bytes (no unknown token), single digits and the special tokens, and
    write the shape of a model for it."""
    bpe = RustTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, min_frequency=20, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    lines = splits("toy")["toy/train.jsonl"].values()
    texts = (f"system\nuser\n{line['question']}\nassistant\n{line['solution']}" for line in lines)
    bpe.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    ends = [bpe.token_to_id("<|im_end|>"), bpe.token_to_id("<|endoftext|>")]
    sizes = {"vocab_size": bpe.get_vocab_size(), "eos_token_id": ends[0]}
    write_json(folder / "config.json", CONFIG | sizes)
    write_json(folder / "generation_config.json", {"eos_token_id": ends})
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "model_max_length": 4096, "chat_template": TEMPLATE})


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def first_model(recipe: Model, folder: Path) -> decoder.Decoder:
    """Make the model that training begins with: the toy's, or random weights of deviation 0.02 (GPT-2)."""
    toy = ROOT / "toy" / "model"
    if folder == toy:
        build_tokenizer(folder)
    else:
        shutil.copytree(toy, folder, dirs_exist_ok=True)
        shape = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", shape | {"num_hidden_layers": recipe.layers})
    if recipe.goes_on:
        return decoder.load_model(folder, torch.float32, torch.device("cpu"))
    model = decoder.Decoder(decoder.read_shape(folder))
    model.logp_chunk = 4096  # as when the shipped model was trained
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def batch_loss(model: decoder.Decoder, tokenizer: Tokenizer, texts: list[tuple[str, str]]) -> torch.Tensor:
    """Compute the mean negative log-likelihood of the tokens that answer each (question, answer), in nats."""
    prompts = tokenizer.encode([tokenizer.render(question, None) for question, _ in texts])
    completions = tokenizer.encode([f"{text}<|im_end|>" for _, text in texts])
    ids, position, lengths, predict = [], [], [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        length = len(prompt) + len(completion)
        predict += range(len(ids) + len(prompt) - 1, len(ids) + length - 1)
        ids += prompt + completion
        position += range(length)
        lengths.append(length)
    ids_T, predict_C = torch.tensor(ids), torch.tensor(predict)
    attend = decoder.sdpa_padded(Segments.of(lengths, lengths, torch.arange(len(ids))))
    target_C = ids_T[predict_C + 1]
    logp_C = model(ids_T, torch.tensor(position), attend, predict_C, target_C, temperature=1.0)
    return -logp_C.mean()


def train(recipe: Model) -> None:
    """Train a model and write its folder."""
    torch.manual_seed(0)
    folder = ROOT / recipe.folder
    model = first_model(recipe, folder)
    tokenizer, texts = Tokenizer(folder), recipe.texts()
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, (0.9, 0.95), weight_decay=0.01, fused=True)

    def factor(i: int) -> float:
        return min((i + 1) / WARMUP, 1 - (i - WARMUP) / (recipe.batches - WARMUP))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    bar = trange(recipe.stop, desc=recipe.folder, unit="batch")
    for _ in bar:
        loss = batch_loss(model, tokenizer, list(islice(texts, recipe.batch_size)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(nats=f"{loss.item():.3f}")
    save_weights(model, folder)


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("names", nargs="+", choices=MODELS)
    names = parser.parse_args().names
    dist.init("cpu")
    for name in names:
        if name != "teacher":  # it has no problems of its own
            write(name, ROOT)
        train(MODELS[name])
