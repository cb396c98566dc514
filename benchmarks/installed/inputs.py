"""Tiny models and data for benchmarks.installed_programs: `python benchmarks/installed/inputs.py
FOLDER`.

It runs in the environment of a program that has transformers, and needs no network.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    set_seed,
)

WORDS = [
    *("the", "a", "cat", "dog", "bird", "sees", "likes", "has", "red", "blue", "small", "large"),
    *("house", "tree", "and", "or", "not", "with", "of", "in", "on", "is", "was"),
]
CHAT = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ' ' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
)
METRIC = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        kinds = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", inputs_description="", features=kinds)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(predictions)}
"""  # noqa: E501


def main() -> None:
    """Write everything under the folder."""
    folder = Path(sys.argv[1])
    draw = random.Random(3)
    tokenizer = make_tokenizer()
    set_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    marks = {"vocab_size": len(tokenizer), "pad_token_id": 0}
    llama = LlamaForCausalLM(
        LlamaConfig(
            **sizes,
            **marks,
            num_key_value_heads=4,
            bos_token_id=1,
            eos_token_id=2,
            max_position_embeddings=128,
        )
    )
    save(llama, tokenizer, folder / "llama")
    save(llama.double(), tokenizer, folder / "llama64")
    still = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 128,
    }
    save(
        BertForSequenceClassification(BertConfig(**sizes, **marks, **still)),
        tokenizer,
        folder / "bert-base-cased",
    )
    turns = [
        {
            "messages": [
                {"role": "user", "content": say(draw)},
                {"role": "assistant", "content": say(draw)},
            ]
        }
        for _ in range(128)
    ]
    (folder / "chat").mkdir(exist_ok=True)
    write_lines(folder / "chat" / "train.jsonl", turns)
    alpaca = [{"instruction": say(draw), "input": "", "output": say(draw)} for _ in range(128)]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    write_lines(folder / "alpaca.jsonl", alpaca)
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "alpaca.json"}}))
    (folder / "text.txt").write_text("\n".join(say(draw) for _ in range(600)))
    write_preferences(folder, draw)
    write_pairs(folder, draw)
    write_images(folder / "images" / "train", draw)
    for split in ("train", "val"):  # as ImageNet's folders are called
        write_images(folder / "imagenet" / split, draw)
    write_captions(folder / "captions", draw)
    save_diffusion(folder / "diffusion")
    (folder / "glue").mkdir(exist_ok=True)
    (folder / "glue" / "glue.py").write_text(METRIC)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words and single letters."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = ["<pad>", "<s>", "</s>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    letters = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:,.#'-0123456789"]
    made.train_from_iterator(
        WORDS * 10,
        trainers.BpeTrainer(vocab_size=300, special_tokens=marks, initial_alphabet=letters),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=128,
    )
    fast.chat_template = CHAT
    return fast


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The model with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def say(draw: random.Random) -> str:
    """A sentence of 4 to 20 words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(4, 20)))


def write_lines(path: Path, rows: Sequence[object]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(folder: Path, draw: random.Random) -> None:
    """A data set of the name and the columns of GLUE's MRPC."""
    home = folder / "nyu-mll" / "glue"
    home.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 350), ("validation", 60)):
        rows = [
            {"sentence1": say(draw), "sentence2": say(draw), "label": i % 2, "idx": i}
            for i in range(count)
        ]
        write_lines(home / f"{split}.jsonl", rows)
    splits = "".join(
        f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation")
    )
    (home / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{splits}---\n"
    )


def write_preferences(folder: Path, draw: random.Random) -> None:
    """Prompts with an answer that is preferred to another, and answers that were judged."""
    for name in ("pairs", "judged"):
        (folder / name).mkdir(exist_ok=True)
    pairs = [{"prompt": say(draw), "chosen": say(draw), "rejected": say(draw)} for _ in range(96)]
    judged = [
        {"prompt": say(draw), "completion": say(draw), "label": bool(i % 2)} for i in range(96)
    ]
    write_lines(folder / "pairs" / "train.jsonl", pairs)
    write_lines(folder / "judged" / "train.jsonl", judged)


def write_images(folder: Path, draw: random.Random) -> None:
    """Two classes of 64 pictures."""
    for kind in ("dark", "light"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for number in range(64):
            level = draw.randint(0, 120) + 120 * (kind == "light")
            Image.new("RGB", (32, 32), (level, draw.randint(0, 255), level)).save(
                folder / kind / f"{number}.png"
            )


def write_captions(folder: Path, draw: random.Random) -> None:
    """Pictures with a text each, as `datasets` reads a folder of them."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(96):
        level = draw.randint(0, 255)
        Image.new("RGB", (32, 32), (level, 128, 255 - level)).save(folder / f"{number}.png")
        lines.append({"file_name": f"{number}.png", "text": say(draw)})
    write_lines(folder / "metadata.jsonl", lines)


def save_diffusion(folder: Path) -> None:
    """A tiny pipeline of Stable Diffusion's parts."""
    from diffusers import (
        AutoencoderKL,
        DDPMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{each}</w>" for each in letters)]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    folder.mkdir(exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(
        str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=16
    )
    set_seed(0)
    text = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(pieces),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    pictures = AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=4,
    )
    StableDiffusionPipeline(
        vae=pictures,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


if __name__ == "__main__":
    main()
