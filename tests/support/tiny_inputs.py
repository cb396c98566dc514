"""Tiny inputs for transformers' model classes, by the parameters of the class's forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.support.tiny_configs import FIRST_SPECIAL, LABELS

FIRST_WORD = 5
Row = dict[str, Any]


class Draw:
    """Draws the values of one row; `find` searches the configuration and those nested in it."""

    def __init__(self, model: Any, row: int, dtype: torch.dtype, even: bool = False) -> None:
        self.random = torch.Generator().manual_seed(1000 + row)
        self.config, self.dtype, self.row = model.config, dtype, row
        self.names = set(inspect.signature(type(model).forward).parameters)
        self.length = 8 if even else int(torch.randint(5, 11, (1,), generator=self.random))

    def find(self, name: str, otherwise: Any) -> Any:
        found = next(find_values(self.config, name), otherwise)
        return found[0] if isinstance(found, list | tuple) else found

    def whole(self, *shape: int, low: int = 0, high: int = LABELS) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def words(self, count: int) -> torch.Tensor:
        return self.whole(
            count, low=FIRST_WORD, high=min(self.find("vocab_size", FIRST_SPECIAL), FIRST_SPECIAL)
        )

    def real(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64).to(self.dtype)


def find_values(config: Any, name: str) -> Iterator[Any]:
    """Yield the values with this name, those of the outer configuration first."""
    own = vars(config)
    value = getattr(config, name, None)  # also finds aliases
    if value is not None:
        yield value
    for each in own.values():
        if hasattr(each, "to_dict"):
            yield from find_values(each, name)


def text(draw: Draw, length: int | None = None) -> Row:
    """Return tokens, with a mask if the model accepts one; otherwise all rows have the
    same length.
    """
    masked = "attention_mask" in draw.names
    size = length or (draw.length if masked else 8)
    made: Row = {"input_ids": draw.words(size)}
    if masked:
        made["attention_mask"] = torch.ones(size, dtype=torch.long)
    if "bbox" in draw.names:
        corner = draw.whole(size, 2, high=20)
        made["bbox"] = torch.cat((corner, corner + draw.whole(size, 2, low=1, high=20)), 1)
    return made


def short_text(draw: Draw) -> Row:
    """Return rows of the same length, for models that don't accept padding."""
    return text(draw, 8)


def long_text(draw: Draw) -> Row:
    """Return rows of one length that is a multiple of every model's chunk size."""
    return text(draw, 64)


def eos_text(draw: Draw) -> Row:
    """Return text with the final token by which CLIP's text models find its end."""
    made = text(draw)
    made["input_ids"][-1] = draw.find("eos_token_id", 2)
    return made


def image(draw: Draw, size: int = 0) -> Row:
    """Return the pixels of one image."""
    size = size or draw.find("image_size", 32)
    made: Row = {"pixel_values": draw.real(draw.find("num_channels", 3), size, size)}
    if "bool_masked_pos" in draw.names:
        patches = (size // draw.find("patch_size", 8)) ** 2
        made["bool_masked_pos"] = draw.whole(patches, high=2).bool()
    return made


def video(draw: Draw) -> Row:
    """Return the pixels of a few images."""
    size, frames = (
        draw.find("image_size", 32),
        draw.find("num_frames", 0) or draw.find("frames_per_clip", 4),
    )
    return {"pixel_values": draw.real(frames, draw.find("num_channels", 3), size, size)}


def video_by_name(draw: Draw) -> Row:
    """Do the same as `video`, for models whose input has that name."""
    return {"pixel_values_videos": video(draw)["pixel_values"]}


def sound(draw: Draw) -> Row:
    """Return audio samples, with a mask if the model accepts one."""
    masked = "attention_mask" in draw.names
    size = 1600 + 160 * (draw.length if masked else 5)
    made: Row = {"input_values": draw.real(size)}
    return {**made, "attention_mask": torch.ones(size, dtype=torch.long)} if masked else made


def spectrum(
    draw: Draw, frames: int = 0, turned: bool = False, name: str = "input_features"
) -> Row:
    """Return the frames of a spectrogram."""
    bands = next(
        (
            draw.find(each, 0)
            for each in ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels")
            if draw.find(each, 0)
        ),
        16,
    )
    masked = "attention_mask" in draw.names and not frames
    count = frames or 40 + 2 * (draw.length if masked else 5)
    made: Row = {name: draw.real(bands, count) if turned else draw.real(count, bands)}
    return {**made, "attention_mask": torch.ones(count, dtype=torch.long)} if masked else made


def whisper(draw: Draw) -> Row:
    """Return a spectrogram with two frames for each position of the encoder."""
    return spectrum(draw, 2 * draw.find("max_source_positions", 50), turned=True)


def picture_of_sound(draw: Draw) -> Row:
    """Return a spectrogram as the audio input."""
    return spectrum(draw, draw.find("max_length", 64), name="input_values")


def past(draw: Draw) -> Row:
    """Return a time series and the values that follow it."""
    channels, length = draw.find("num_input_channels", 1), draw.find("context_length", 32)
    made: Row = {"past_values": draw.real(length, channels)}
    if "future_values" in draw.names:
        made["future_values"] = draw.real(draw.find("prediction_length", 24), channels)
    return made


def text_and_image(draw: Draw) -> Row:
    """Return a text and an image."""
    return {**eos_text(draw), **image(draw)}


def choices(draw: Draw) -> Row:
    """Return two texts of the same length."""
    one, other = text(draw), text(draw)
    return {name: torch.stack((value, other[name])) for name, value in one.items()}


def picked(name: str) -> Callable[[Draw], Row]:
    """Return a function that draws rows which only a few classes accept."""
    return {
        "image 64": lambda draw: image(draw, 64),
        "image 128": lambda draw: image(draw, 128),
        "image 224": lambda draw: image(draw, 224),
        "spectrum turned": lambda draw: spectrum(draw, turned=True),
        "spectrum of sound": lambda draw: spectrum(draw, name="input_values"),
        "long spectrum": lambda draw: spectrum(draw, 200),
        "text and sound": lambda draw: {**text(draw), **whisper(draw)},
        "text and spectrum": lambda draw: {**text(draw, 8), **spectrum(draw, 64)},
    }[name]


def by_kind(name: str) -> Callable[[Draw], Row]:
    """Return the function that draws rows of this kind."""
    found: Any = globals().get(name.replace(" ", "_"))
    return found if callable(found) else picked(name)


def input_kinds(model: Any) -> list[str]:
    """Return the kinds of inputs that a model may accept, the likeliest first."""
    name, names = type(model).__name__, set(inspect.signature(type(model).forward).parameters)
    main, found = getattr(model, "main_input_name", "input_ids"), []
    if name.endswith("MultipleChoice"):
        return ["choices"]
    if {"input_ids", "pixel_values"} <= names and ("return_loss" in names or "Retrieval" in name):
        found.append("text and image")
    if "pixel_values" in names and (main == "pixel_values" or "input_ids" not in names):
        video_first = (
            ["video", "image"] if "Video" in name or "TimeSformer" in name else ["image", "video"]
        )
        found += [*video_first, "image 64", "image 128", "image 224"]
    if "pixel_values_videos" in names and main == "pixel_values_videos":
        found.append("video by name")
    if "input_features" in names and ("input_ids" not in names or main == "input_features"):
        found += ["whisper", "spectrum", "spectrum turned", "long spectrum"]
    if "input_values" in names:
        found += ["sound", "picture of sound", "spectrum of sound"]
    if "past_values" in names:
        found.append("past")
    if {"input_ids", "input_features"} <= names:
        found += ["text and sound", "text and spectrum"]
    if "input_ids" in names:
        found += ["text", "eos text", "short text", "text and image", "long text"]
    return list(dict.fromkeys(found))
