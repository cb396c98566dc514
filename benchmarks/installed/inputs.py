"""Make tiny models and data sets for benchmarks.installed_programs.

  python benchmarks/installed/inputs.py FOLDER

Runs in the environment of a program that has transformers, and needs no network.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
    """Write all models and data sets into the folder."""
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
                {"role": "user", "content": draw_sentence(draw)},
                {"role": "assistant", "content": draw_sentence(draw)},
            ]
        }
        for _ in range(128)
    ]
    (folder / "chat").mkdir(exist_ok=True)
    write_lines(folder / "chat" / "train.jsonl", turns)
    alpaca = [
        {"instruction": draw_sentence(draw), "input": "", "output": draw_sentence(draw)}
        for _ in range(128)
    ]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    write_lines(folder / "alpaca.jsonl", alpaca)
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "alpaca.json"}}))
    (folder / "text.txt").write_text("\n".join(draw_sentence(draw) for _ in range(600)))
    write_preferences(folder, draw)
    write_pairs(folder, draw)
    write_images(folder / "images" / "train", draw)
    for split in ("train", "val"):  # the folder names of ImageNet
        write_images(folder / "imagenet" / split, draw)
    write_images(folder / "few" / "train", draw, 24)
    write_boxes(folder / "coco", draw)
    write_tokens(folder / "nano", draw)
    write_captions(folder / "captions", draw)
    save_diffusion(folder / "diffusion")
    save_diffusion(folder / "kohya_model", for_kohya=True)
    write_kohya(folder, draw)
    save_backbone(folder / "hub" / "checkpoints")
    (folder / "glue").mkdir(exist_ok=True)
    (folder / "glue" / "glue.py").write_text(METRIC)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words and single letters."""
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
    """Save the model with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def draw_sentence(draw: random.Random) -> str:
    """Return a random sentence of 4 to 20 words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(4, 20)))


def write_lines(path: Path, rows: Sequence[object]) -> None:
    """Write rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(folder: Path, draw: random.Random) -> None:
    """Write a data set with the name and the columns of GLUE's MRPC."""
    home = folder / "nyu-mll" / "glue"
    home.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 350), ("validation", 60)):
        rows = [
            {
                "sentence1": draw_sentence(draw),
                "sentence2": draw_sentence(draw),
                "label": i % 2,
                "idx": i,
            }
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
    """Write prompts with a preferred and a rejected answer, and answers with ratings."""
    for name in ("pairs", "judged"):
        (folder / name).mkdir(exist_ok=True)
    pairs = [
        {
            "prompt": draw_sentence(draw),
            "chosen": draw_sentence(draw),
            "rejected": draw_sentence(draw),
        }
        for _ in range(96)
    ]
    judged = [
        {"prompt": draw_sentence(draw), "completion": draw_sentence(draw), "label": bool(i % 2)}
        for i in range(96)
    ]
    write_lines(folder / "pairs" / "train.jsonl", pairs)
    write_lines(folder / "judged" / "train.jsonl", judged)


def write_images(folder: Path, draw: random.Random, count: int = 64) -> None:
    """Write `count` images for each of two classes."""
    for kind in ("dark", "light"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            level = draw.randint(0, 120) + 120 * (kind == "light")
            Image.new("RGB", (32, 32), (level, draw.randint(0, 255), level)).save(
                folder / kind / f"{number}.png"
            )


def write_boxes(folder: Path, draw: random.Random) -> None:
    """Write images with one to three boxes each, in COCO's format."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    kinds = [{"id": number, "name": WORDS[number]} for number in (1, 2, 3)]
    for split in ("train2017", "val2017"):
        (folder / split).mkdir(exist_ok=True)
        pictures, boxes = [], []
        for number in range(24 if split == "train2017" else 4):
            name = f"{number:012}.png"
            colour = tuple(draw.randint(0, 255) for _ in range(3))
            Image.new("RGB", (64, 48), colour).save(folder / split / name)
            pictures.append({"id": number, "file_name": name, "width": 64, "height": 48})
            boxes += [draw_box(draw, number, len(boxes) + place) for place in range(1 + number % 3)]
        found = {"images": pictures, "annotations": boxes, "categories": kinds}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(found))


def draw_box(draw: random.Random, picture: int, number: int) -> dict[str, object]:
    """Return a box around an object of one of three kinds."""
    x, y, width, height = draw.randint(0, 30), draw.randint(0, 20), 20, 16
    return {
        "id": number,
        "image_id": picture,
        "category_id": draw.randint(1, 3),
        "bbox": [x, y, width, height],
        "area": width * height,
        "iscrowd": 0,
        "segmentation": [[x, y, x + width, y, x + width, y + height]],
    }


def write_tokens(folder: Path, draw: random.Random) -> None:
    """Write tokens in the format that nanoGPT reads."""
    folder.mkdir(exist_ok=True)
    for split in ("train", "val"):
        tokens = array("H", [draw.randint(0, 63) for _ in range(4096)])
        (folder / f"{split}.bin").write_bytes(tokens.tobytes())


def write_captions(folder: Path, draw: random.Random) -> None:
    """Write images with captions as an image folder of `datasets`."""
    folder.mkdir(exist_ok=True)
    lines = []
    for number in range(96):
        level = draw.randint(0, 255)
        Image.new("RGB", (32, 32), (level, 128, 255 - level)).save(folder / f"{number}.png")
        lines.append({"file_name": f"{number}.png", "text": draw_sentence(draw)})
    write_lines(folder / "metadata.jsonl", lines)


def write_kohya(folder: Path, draw: random.Random) -> None:
    """Write images with captions, and a tokenizer, as kohya's trainers read them."""
    images = folder / "kohya" / "1_cat"
    images.mkdir(parents=True, exist_ok=True)
    for number in range(48):
        level = draw.randint(0, 255)
        Image.new("RGB", (32, 32), (level, 128, 255 - level)).save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(draw_sentence(draw))
    tokenizer = folder / "kohya_tokenizers" / "openai_clip-vit-large-patch14"
    tokenizer.mkdir(parents=True, exist_ok=True)
    model = folder / "kohya_model"
    for each in ("vocab.json", "merges.txt", "tokenizer/tokenizer_config.json"):
        shutil.copy(model / each, tokenizer)


def save_diffusion(folder: Path, for_kohya: bool = False) -> None:
    """Save a tiny pipeline with the parts of Stable Diffusion.

    With `for_kohya`, its U-Net has as many blocks as Stable Diffusion's.
    """
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
    small = {
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    sizes: dict[str, Any] = {"block_out_channels": (32,) * 4} if for_kohya else small
    unet = UNet2DConditionModel(
        sample_size=8, cross_attention_dim=16, attention_head_dim=4, **sizes
    )
    pictures = AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        norm_num_groups=4,
    )
    for kind in ("ema", "mse"):  # images are eight times as large as their latents, as in DiT
        AutoencoderKL(
            block_out_channels=(4, 4, 4, 4),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
        ).save_pretrained(folder.parent / "stabilityai" / f"sd-vae-ft-{kind}")
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


def save_backbone(folder: Path) -> None:
    """Save ResNet-18 weights where torchvision keeps downloaded ones."""
    import torch
    from torchvision.models import ResNet18_Weights, resnet18

    folder.mkdir(parents=True, exist_ok=True)
    name = ResNet18_Weights.DEFAULT.url.rpartition("/")[2]
    torch.save(resnet18().state_dict(), folder / name)


if __name__ == "__main__":
    main()
