"""Train LoRA weights of a Llama with TRL's SFTTrainer on tokenized texts under torchrun."""

from __future__ import annotations

import os

# modules in this folder; imported first, because they limit the GPU
from place import CUDA, SIZES, wait_for_start  # type: ignore[import-not-found]  # isort: skip
from datasets import Dataset
from llama import Rows, make_model  # type: ignore[import-not-found]
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Train COUNT steps."""
    wait_for_start()
    words = Tokenizer(WordLevel({str(word): word for word in range(SIZES["WORDS"])}, unk_token="0"))
    arguments = SFTConfig(
        os.path.join(os.environ["FOLDER"], "trained"),
        per_device_train_batch_size=SIZES["ROWS"],
        max_steps=SIZES["COUNT"],
        max_length=SIZES["LENGTH"],
        use_cpu=not CUDA,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=50,
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": Rows().tokens.tolist()}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, unk_token="0", pad_token="1", eos_token="2"
        ),
        peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
