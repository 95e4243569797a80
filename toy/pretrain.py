"""Build the toy model: a tokenizer, then a Qwen2-format decoder that can work answers out but rarely does.

    python toy/pretrain.py      # writes toy/model/ (about 20 minutes on one core)

A third of its training texts are worked solutions, two thirds are bare guesses ("#### 12"). So it mostly
guesses, and is mostly wrong; its worked solutions are mostly right. Reinforcement learning then teaches
it to work answers out.
"""

import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from problems import problems, splits  # noqa: E402
from tokenizers import Tokenizer as RustTokenizer  # noqa: E402
from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: E402
from tqdm import trange  # noqa: E402

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
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def build_tokenizer(folder: Path, lines: list[dict]) -> None:
    """Train a byte-level BPE with all 256 bytes (no unknown token), single digits and the special tokens."""
    bpe = RustTokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640, min_frequency=20, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    texts = (f"system\nuser\n{line['question']}\nassistant\n{line['solution']}" for line in lines)
    bpe.train_from_iterator(texts, trainer)
    bpe.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 4096,
        "chat_template": TEMPLATE,
    })
    ends = [bpe.token_to_id("<|im_end|>"), bpe.token_to_id("<|endoftext|>")]
    sizes = {"vocab_size": bpe.get_vocab_size(), "eos_token_id": ends[0]}
    write_json(folder / "config.json", CONFIG | sizes)
    write_json(folder / "generation_config.json", {"eos_token_id": ends})


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def fresh_model(folder: Path) -> decoder.Decoder:
    """Build the decoder with random weights, standard deviation 0.02 as in GPT-2."""
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
    attend = decoder.sdpa_padded(Segments.plain(lengths))
    target_C = ids_T[predict_C + 1]
    logp_C = model(ids_T, torch.tensor(position), attend, predict_C, target_C, temperature=1.0)
    return -logp_C.mean()


def pretrain(
    folder: Path,
    texts: Iterator[tuple[str, str]],
    batches: int,
    batch_size: int,
    lr: float,
    stop: int | None = None,
) -> None:
    """Train the decoder that `folder` describes on (question, answer)s, from its weights if it has any, and
    write them there. The rate falls to 0 over `batches`; training ends early at `stop`."""
    tokenizer = Tokenizer(folder)
    began = (folder / "model.safetensors").is_file()
    model = decoder.load_model(folder, torch.float32, torch.device("cpu")) if began else fresh_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    warmup = 50

    def factor(i: int) -> float:
        return min((i + 1) / warmup, 1 - (i - warmup) / (batches - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    bar = trange(stop or batches, desc="pre-training", unit="batch")
    for i in bar:
        loss = batch_loss(model, tokenizer, list(islice(texts, batch_size)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(nats=f"{loss.item():.3f}")
        if (i + 1) % 200 == 0:
            save_weights(model, folder)
    save_weights(model, folder)


def worked_or_guessed(taboo: frozenset[tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """Yield (question, answer)s without end: a third of the answers are worked, two thirds are guesses."""
    rng = random.Random(0)
    for line, _ in problems(seed=3, taboo=taboo):
        answer = line["solution"] if rng.random() < 1 / 3 else f"#### {line['answer']}"
        yield line["question"], answer


def main(folder: Path, batches: int, batch_size: int, lr: float) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    train, test = splits()
    build_tokenizer(folder, list(train.values()))
    (folder / "model.safetensors").unlink(missing_ok=True)
    pretrain(folder, worked_or_guessed(frozenset(test)), batches, batch_size, lr)


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "model")
    parser.add_argument("--batches", type=int, default=1300)
    parser.add_argument("--batch-size", type=int, default=160)
    parser.add_argument("--lr", type=float, default=2e-3)
    arguments = parser.parse_args()
    dist.init("cpu")
    main(arguments.out, arguments.batches, arguments.batch_size, arguments.lr)
