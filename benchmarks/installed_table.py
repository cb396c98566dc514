"""The programs of benchmarks.installed_programs, and how each is started."""

from __future__ import annotations

import msgspec

TRAINING = (
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2 --num_train_epochs 3 "
    "--report_to none --logging_steps 5 --save_strategy no --output_dir out --seed 7"
)
# some trainers use fewer rows, so they get more epochs
SHORT = (
    "--per_device_train_batch_size 4 --num_train_epochs 2 --report_to none --logging_steps 5 "
    "--save_strategy no --output_dir out --seed 7 --use_cpu --bf16 False --lr_scheduler_type linear"
)
SFT = (
    "--model_name_or_path {inputs}/llama --dataset_name {inputs}/chat --max_length 64 "
    "--use_cpu --bf16 False --lr_scheduler_type linear"
)
CHOSEN = "--optim {optimizer} --learning_rate {rate}"
FACTORY = """
stage: sft
do_train: true
model_name_or_path: {inputs}/llama
dataset_dir: {inputs}
dataset: tiny
template: default
finetuning_type: full
cutoff_len: 64
output_dir: out
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
num_train_epochs: 3
logging_steps: 5
save_strategy: "no"
report_to: none
use_cpu: true
learning_rate: {rate}
optim: {optimizer}
lr_scheduler_type: linear
"""
AXOLOTL = """
base_model: {inputs}/llama
datasets:
  - path: {inputs}/alpaca.jsonl
    ds_type: json
    type: alpaca
sequence_len: 128
output_dir: out
micro_batch_size: 4
gradient_accumulation_steps: 2
num_epochs: 3
learning_rate: {rate}
optimizer: {optimizer}
lr_scheduler: linear
logging_steps: 5
save_strategy: "no"
val_set_size: 0
bf16: false
tf32: false
use_cpu: true
"""
TWO = "torchrun --standalone --nproc-per-node 2"


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program: its title, its command, its packages and its own launcher."""

    title: str
    words: str  # arguments of python; {inputs}, {src}, {jobs}, {rate} and {optimizer} are filled in
    packages: tuple[str, ...] = ()
    environment: str = "all"
    settings: str = ""  # content of x.yaml in the working folder
    links: tuple[tuple[str, str], ...] = ()  # symlinks in the working folder: name and target
    own: str = TWO + " {words}"
    ratios: str = ""  # what its script takes to train by `with_plan`, without `evener run`
    variables: tuple[
        tuple[str, str], ...
    ] = ()  # environment variables for the program's own launcher
    always: tuple[tuple[str, str], ...] = ()  # environment variables for all runs
    optimizers: tuple[tuple[str, str], ...] = (("", ""),)
    by_row: bool = False  # its random numbers are made to depend on the row only
    on_cpu: bool = False  # its calls for a GPU are redirected to the CPU
    launcher: bool = False  # `evener run --` gets the command of its own launcher


ACCELERATE = "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0"
TORCH = ("sgd", "0.05"), ("adamw_torch", "1e-3")
OPTIMIZERS = ("sgd", "0.05"), ("adamw", "1e-3")
TRAINERS = ("transformers", "accelerate")


def job(title: str, words: str, *packages: str, **more: object) -> Program:
    """Return a program of benchmarks/installed, which uses a library's trainer as its users do."""
    return Program(title=title, words="{jobs}/" + words, packages=packages, **more)  # type: ignore[arg-type]


def launched(title: str, command: str, *packages: str, **more: object) -> Program:
    """Return a program that trains in processes of its own launcher, also under `evener run`."""
    return Program(title=title, words="", own=command, packages=packages, launcher=True, **more)  # type: ignore[arg-type]


def old(
    title: str,
    words: str,
    packages: tuple[str, ...] = ("torch", "timm"),
    always: tuple[tuple[str, str], ...] = (),
    settings: str = "",
) -> Program:
    """Return an older repository's script; its calls for a GPU are redirected to the CPU."""
    return Program(
        title=title,
        words="{jobs}/old_script.py {src}/" + words,
        packages=packages,
        # PYTHONOPTIMIZE disables its asserts on versions and GPUs
        always=(("PYTHONOPTIMIZE", "1"), *always),
        settings=settings,
        on_cpu=True,
        by_row=True,
    )


LAUNCHED = {
    "by_torchrun": launched(
        "torchrun --nproc-per-node 2, FSDP2, a loop", TWO + " {jobs}/sharded_loop.py 2", "torch"
    ),
    "by_accelerate": launched(
        "accelerate launch, by_feature/gradient_accumulation.py",
        ACCELERATE + " {src}/accelerate/examples/by_feature/gradient_accumulation.py "
        "--gradient_accumulation_steps 2",
        "accelerate",
    ),
    "by_deepspeed": launched(
        "deepspeed --num_gpus 2, a loop, ZeRO-2",
        "deepspeed --num_gpus 2 {jobs}/deep.py 2",
        "deepspeed",
        always=(("DS_ACCELERATOR", "cpu"),),
    ),
    "by_trl": launched(
        "trl sft",
        f"trl sft {SFT} {TRAINING} {CHOSEN} --multi_gpu --num_processes 2 --main_process_port 0",
        "trl",
        optimizers=TORCH[:1],
    ),
    "by_axolotl": launched(
        "axolotl train",
        "axolotl train x.yaml --launcher torchrun -- --nproc-per-node 2",
        "axolotl",
        environment="axolotl",
        settings=AXOLOTL,
        always=(("AXOLOTL_DO_NOT_TRACK", "1"), ("DO_NOT_TRACK", "1")),
        optimizers=TORCH[:1],
    ),
    "by_yolo": launched(
        "ultralytics, its trainer starts its processes",
        "python {jobs}/yolo.py {inputs}/imagenet",
        "ultralytics",
    ),
    "by_llamafactory": launched(
        "llamafactory-cli train",
        "llamafactory-cli train x.yaml",
        "llamafactory",
        environment="llamafactory",
        settings=FACTORY,
        always=(("FORCE_TORCHRUN", "1"), ("NPROC_PER_NODE", "2")),
        optimizers=TORCH[:1],
    ),
    "by_spawn": launched(
        "torch.multiprocessing.spawn, pytorch/examples' multigpu.py",
        "python {src}/examples/distributed/ddp-tutorial-series/multigpu.py 2 1",
        "torch",
        on_cpu=True,
    ),
}
PROGRAMS = {
    "trl": Program(
        title="TRL, sft",
        words=f"-m trl.scripts.sft {SFT} {TRAINING} {CHOSEN}",
        packages=("trl", *TRAINERS),
        optimizers=TORCH,
    ),
    "trl_packing": Program(
        title="TRL, sft, packing",
        words=f"-m trl.scripts.sft {SFT} {TRAINING} --packing --packing_strategy wrapped "
        f"--dataloader_drop_last True {CHOSEN}",
        packages=("trl", *TRAINERS),
        optimizers=TORCH[:1],
    ),
    "trl_lora": Program(
        title="TRL, sft, LoRA, gradient checkpointing",
        words=f"-m trl.scripts.sft {SFT} {TRAINING} --use_peft --lora_r 4 --lora_dropout 0 "
        f"--lora_target_modules q_proj v_proj --gradient_checkpointing True {CHOSEN}",
        packages=("trl", "peft", *TRAINERS),
        optimizers=TORCH[1:],
    ),
    "trl_dpo": Program(
        title="TRL, dpo",
        words=f"-m trl.scripts.dpo --model_name_or_path {{inputs}}/llama "
        f"--dataset_name {{inputs}}/pairs --max_length 64 {SHORT} {CHOSEN}",
        packages=("trl", *TRAINERS),
        optimizers=TORCH[:1],
    ),
    "trl_reward": Program(
        title="TRL, reward",
        words=f"-m trl.scripts.reward --model_name_or_path {{inputs}}/llama "
        f"--dataset_name {{inputs}}/pairs --max_length 64 {SHORT} {CHOSEN}",
        packages=("trl", *TRAINERS),
        optimizers=TORCH[:1],
    ),
    "trl_kto": Program(
        title="TRL, kto",
        words=f"-m trl.scripts.kto --model_name_or_path {{inputs}}/llama "
        f"--dataset_name {{inputs}}/judged --max_length 64 {SHORT} {CHOSEN}",
        packages=("trl", *TRAINERS),
        optimizers=TORCH[:1],
    ),
    "run_clm": Program(
        title="transformers, run_clm.py",
        words="{src}/run_clm.py --model_name_or_path {inputs}/llama --train_file "
        "{inputs}/text.txt --do_train --block_size 32 --max_train_samples 128 --use_cpu "
        f"{TRAINING} {CHOSEN}",
        packages=TRAINERS,
        optimizers=TORCH,
    ),
    "run_clm64": Program(
        title="the same, the model in float64",
        words="{src}/run_clm.py --model_name_or_path {inputs}/llama64 --dtype auto "
        "--train_file {inputs}/text.txt --do_train --block_size 32 --max_train_samples 128 "
        f"--use_cpu {TRAINING} {CHOSEN}",
        packages=TRAINERS,
        optimizers=TORCH,
    ),
    "hf_bert": job("transformers, Trainer, BERT classifier", "hf_trainer.py bert", *TRAINERS),
    "hf_t5": job("transformers, Seq2SeqTrainer, T5", "hf_trainer.py t5", *TRAINERS),
    "hf_vit": job("transformers, Trainer, ViT, load_best_model", "hf_trainer.py vit", *TRAINERS),
    "hf_clip": job("transformers, Trainer, CLIP", "hf_trainer.py clip", *TRAINERS),
    "hf_stream": job("transformers, Trainer, a stream", "hf_trainer.py stream", *TRAINERS),
    **{
        f"planned_{kind}": job(
            f"with_plan, {title}",
            f"planned.py {kind}",
            *TRAINERS,
            ratios=" 3 1",
            by_row=kind == "drawn",
        )
        for kind, title in (
            ("t5", "Seq2SeqTrainer, generation, beside even ratios"),
            ("bert", "Trainer, resumed in an epoch, beside even ratios"),
            ("drawn", "a loss with random numbers, beside Trainer"),
        )
    },
    "nlp_example": Program(
        title="accelerate, nlp_example.py",
        words="{src}/accelerate/examples/nlp_example.py --cpu",
        packages=("accelerate",),
    ),
    "complete_nlp_example": Program(
        title="accelerate, complete_nlp_example.py",
        words="{src}/accelerate/examples/complete_nlp_example.py --cpu "
        "--checkpointing_steps epoch --output_dir out",
        packages=("accelerate",),
    ),
    "accelerate_accumulation": Program(
        title="accelerate, by_feature/gradient_accumulation.py",
        words="{src}/accelerate/examples/by_feature/gradient_accumulation.py --cpu "
        "--gradient_accumulation_steps 2",
        packages=("accelerate",),
    ),
    "accelerate_metrics": Program(
        title="accelerate, by_feature/multi_process_metrics.py",
        words="{src}/accelerate/examples/by_feature/multi_process_metrics.py --cpu",
        packages=("accelerate",),
    ),
    "accelerate_local_sgd": Program(
        title="accelerate, by_feature/local_sgd.py",
        words="{src}/accelerate/examples/by_feature/local_sgd.py --cpu "
        "--gradient_accumulation_steps 1 --local_sgd_steps 4",
        packages=("accelerate",),
    ),
    "accelerate_early_stopping": Program(
        title="accelerate, by_feature/early_stopping.py",
        words="{src}/accelerate/examples/by_feature/early_stopping.py --cpu",
        packages=("accelerate",),
    ),
    "llamafactory": Program(
        title="LlamaFactory",
        environment="llamafactory",
        words="llamafactory-cli train x.yaml",
        packages=("llamafactory", *TRAINERS),
        settings=FACTORY,
        own="llamafactory-cli train x.yaml",
        variables=(("FORCE_TORCHRUN", "1"), ("NPROC_PER_NODE", "2")),
        optimizers=TORCH,
    ),
    "swift": Program(
        title="ms-swift",
        environment="swift",
        words="swift sft --model {inputs}/llama --model_type llama --template default --dataset "
        "{inputs}/chat/train.jsonl --tuner_type full --torch_dtype float32 --max_length 64 "
        "--use_cpu true --gradient_checkpointing false "
        f"--split_dataset_ratio 0 {TRAINING} {CHOSEN}",
        packages=("ms_swift", *TRAINERS),
        own="{words}",
        variables=(("NPROC_PER_NODE", "2"),),
        optimizers=TORCH,
    ),
    "axolotl": Program(
        title="axolotl",
        environment="axolotl",
        words="-m axolotl.cli.train x.yaml",
        packages=("axolotl", *TRAINERS),
        settings=AXOLOTL,
        always=(("AXOLOTL_DO_NOT_TRACK", "1"), ("DO_NOT_TRACK", "1")),
        optimizers=TORCH,
    ),
    "timm": Program(
        title="timm, train.py, a vision transformer",
        words="{src}/pytorch-image-models/train.py --data-dir {inputs}/images --val-split train "
        "--device cpu --model vit_tiny_patch16_224 --input-size 3 32 32 --gp avg --model-kwargs "
        "img_size=32 patch_size=8 depth=2 embed_dim=48 num_heads=3 class_token=False "
        "--num-classes 2 -b 4 --epochs 2 --warmup-epochs 0 --sched step --decay-epochs 100 "
        "--lr {rate} --opt {optimizer} --no-aug --workers 1 --output out",
        packages=("timm",),
        optimizers=OPTIMIZERS,
    ),
    "lightning": job(
        "Lightning, its demo model",
        "lightning_boring.py {optimizer} {rate}",
        "lightning",
        optimizers=OPTIMIZERS,
    ),
    "fabric": job("Lightning Fabric, image classifier", "fabric_images.py", "lightning"),
    "kohya": Program(
        title="kohya sd-scripts, train_network.py",
        environment="kohya",
        words="{jobs}/kohya.py {src}/sd-scripts --pretrained_model_name_or_path "
        "{inputs}/kohya_model --train_data_dir {inputs}/kohya --output_dir out --resolution 32 "
        "--tokenizer_cache_dir {inputs}/kohya_tokenizers --train_batch_size 4 --max_train_steps "
        "16 --network_module networks.lora --network_dim 4 --optimizer_type SGD --learning_rate "
        "0.05 --seed 3 --mixed_precision no --save_model_as safetensors "
        "--max_data_loader_n_workers 0",
        packages=("diffusers", "transformers", "accelerate"),
        by_row=True,
    ),
    "ultralytics": Program(
        title="ultralytics, YOLO classifier",
        words="{jobs}/yolo.py {inputs}/imagenet",  # it has a folder val, too
        packages=("ultralytics",),
    ),
    "st_cosine": job(
        "sentence-transformers, CosineSimilarityLoss",
        "sentences.py {inputs} cosine",
        "sentence-transformers",
    ),
    "st_mnrl": job(
        "sentence-transformers, MultipleNegativesRankingLoss",
        "sentences.py {inputs} mnrl",
        "sentence-transformers",
    ),
    "lucid": job(
        "denoising-diffusion-pytorch, its Trainer, EMA",
        "lucid.py {inputs}/images",
        "denoising-diffusion-pytorch",
        by_row=True,
    ),
    "monai": job("MONAI, UNet, Dice", "monai_unet.py", "monai"),
    "litgpt": job(
        "litgpt, its loop of pretraining, by Fabric",
        "lit.py",
        "litgpt",
        always=(("TORCHDYNAMO_DISABLE", "1"),),
    ),
    "fastai": job(
        "fastai, Learner.distrib_ctx", "fast.py", "fastai", environment="more", on_cpu=True
    ),
    "composer": job("composer, Trainer", "compose.py", "mosaicml", environment="more"),
    "speechbrain": job("speechbrain, Brain.fit", "speech.py", "speechbrain", environment="more"),
    "torchtune_full": job(
        "torchtune, full_finetune_distributed", "tune.py full", "torchtune", environment="more"
    ),
    "torchtune_lora": job(
        "torchtune, lora_finetune_distributed", "tune.py lora", "torchtune", environment="more"
    ),
    "pyg": job("PyG, distributed_batching's loop", "graphs.py", "torch-geometric"),
    "pyg_split": job("PyG, rows split by hand", "graphs.py split", "torch-geometric"),
    **{
        f"deepspeed_{stage}": job(
            f"DeepSpeed, a loop, ZeRO-{stage}",
            f"deep.py {stage}",
            "deepspeed",
            always=(("DS_ACCELERATOR", "cpu"),),
        )
        for stage in (1, 2, 3)
    },
    "deepspeed_data": job(
        "DeepSpeed, training_data given to initialize, ZeRO-2",
        "deep.py 2 --training_data",
        "deepspeed",
        always=(("DS_ACCELERATOR", "cpu"),),
    ),
    "fsdp1": job("FSDP1, a loop", "sharded_loop.py 1", "torch"),
    "fsdp2": job("FSDP2, a loop", "sharded_loop.py 2", "torch"),
    "ddp_tutorial": Program(
        title="pytorch/examples, multigpu_torchrun.py",
        words="{src}/examples/distributed/ddp-tutorial-series/multigpu_torchrun.py 2 1 "
        "--batch_size 32",
        packages=("torch",),
        on_cpu=True,
    ),
    "imagenet": Program(
        title="pytorch/examples, imagenet/main.py",
        words="{src}/examples/imagenet/main.py -a squeezenet1_1 --epochs 2 -b 4 -j 1 --lr 0.001 "
        "--world-size 2 --dist-url env:// --dist-backend gloo --seed 3 --print-freq 5 "
        "{inputs}/imagenet",
        packages=("torchvision",),
        on_cpu=True,
        by_row=True,
    ),
    "moco": Program(
        title="facebookresearch/moco, main_moco.py, started by spawn",
        words="{src}/moco/main_moco.py {inputs}/few -a resnet18 -b 8 -j 1 --epochs 1 --lr 0.03 "
        "--moco-k 16 --multiprocessing-distributed --world-size 1 --rank 0 --seed 3 "
        "--dist-url tcp://127.0.0.1:29571 --dist-backend gloo",
        packages=("torch", "torchvision"),
        environment="vision",
        always=(("OLD_TORCH", "1"),),
        own="python {words}",
        on_cpu=True,
        by_row=True,
    ),
    "mae": old(
        "facebookresearch/mae, main_pretrain.py",
        "mae/main_pretrain.py --device cpu "
        "--model mae_vit_base_patch16 --batch_size 4 --epochs 2 --warmup_epochs 1 "
        "--data_path {inputs}/images --num_workers 1 --blr 1e-2 --output_dir out --log_dir out",
    ),
    **{
        name: old(
            f"facebookresearch/dino, main_dino.py{title}",
            "dino/main_dino.py --arch vit_tiny --out_dim 64 --local_crops_number 2 "
            "--batch_size_per_gpu 4 --epochs 2 --warmup_epochs 0 --data_path {inputs}/few/train "
            "--num_workers 1 --use_fp16 false --drop_path_rate 0",
            always=always,
        )
        for name, title, always in (
            ("dino", "", ()),
            ("dino_unchecked", " without its isfinite(loss.item())", (("UNCHECKED", "1"),)),
        )
    },
    "swav": old(
        "facebookresearch/swav, main_swav.py",
        "swav/main_swav.py --data_path "
        "{inputs}/few/train --nmb_crops 2 1 --size_crops 64 32 --min_scale_crops 0.14 0.05 "
        "--max_scale_crops 1 0.14 --nmb_prototypes 16 --feat_dim 16 --hidden_mlp 32 --epochs 1 "
        "--batch_size 4 --base_lr 0.05 --warmup_epochs 0 --workers 1 --use_fp16 false "
        "--sync_bn none",
    ),
    "detr": old(
        "facebookresearch/detr, main.py",
        "detr/main.py --device cpu --backbone resnet18 "
        "--enc_layers 1 --dec_layers 1 --dim_feedforward 32 --hidden_dim 32 --nheads 2 "
        "--num_queries 8 --dropout 0 --batch_size 2 --epochs 1 --num_workers 1 --coco_path "
        "{inputs}/coco",
        packages=("torchvision",),
    ),
    "dit": old(
        "facebookresearch/DiT, train.py",
        "DiT/train.py --data-path {inputs}/few/train "
        "--image-size 256 --model DiT-S/8 --global-batch-size 8 --epochs 3 --num-classes 2 "
        "--num-workers 1 --log-every 5",
        packages=("timm", "diffusers"),
    ),
    "nanogpt": Program(
        title="karpathy/nanoGPT, train.py",
        words="{src}/nanoGPT/train.py --dataset=tiny --eval_interval=1000 --eval_iters=1 "
        "--block_size=16 --batch_size=4 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=16 "
        "--compile=False --gradient_accumulation_steps=2 --backend=gloo --dtype=float32",
        packages=("torch",),
        links=(
            ("configurator.py", "{src}/nanoGPT/configurator.py"),
            ("data/tiny", "{inputs}/nano"),
        ),
        on_cpu=True,
    ),
    "deepspeed_cifar": job(
        "DeepSpeedExamples, cifar10_deepspeed.py",
        "old_script.py {src}/DeepSpeedExamples/training/cifar/cifar10_deepspeed.py --deepspeed "
        "--epochs 2 --dtype fp32 --stage 2",
        "deepspeed",
        always=(("DS_ACCELERATOR", "cpu"),),
    ),
    "deepspeed_gan": old(
        "DeepSpeedExamples, gan_deepspeed_train.py",
        "DeepSpeedExamples/training/gan/gan_deepspeed_train.py --dataset celeba --dataroot "
        "{inputs}/few/train --imageSize 64 --ngf 4 --ndf 4 --nz 8 --batchSize 4 --epochs 2 "
        "--workers 0 --manualSeed 3 --outf out --tensorboard_path out --local_rank 0 --deepspeed "
        "--deepspeed_config x.yaml",
        packages=("deepspeed",),
        always=(("DS_ACCELERATOR", "cpu"),),
        settings='{{"train_batch_size": 8}}',
    ),
    "open_clip": Program(
        title="open_clip, its command, a contrastive loss over ranks",
        words="-m open_clip_train.main --dataset-type synthetic --train-num-samples 32 --model "
        "ViT-S-32-alt --batch-size 4 --epochs 1 --workers 1 --precision fp32 --device cpu "
        "--dist-backend gloo --lr 1e-4",
        packages=("open_clip_torch",),
    ),
    "nanochat": job(
        "karpathy/nanochat, scripts.base_train",
        "chat.py {src}/nanochat",
        "torch",
        always=(("TORCHDYNAMO_DISABLE", "1"),),
    ),
    **{
        f"loop_{kind}": job(f"a loop: {title}", f"loops.py {kind}", "torch", environment=home)
        for kind, title, home in (
            ("plain", "a compiled network, losses logged over ranks", "all"),
            ("stream", "an IterableDataset", "all"),
            ("prefetched", "a prefetcher as apex's examples have it", "all"),
            ("mixed", "mixup by randperm(len(x))", "all"),
            ("gathered", "all_gather of each step's predictions", "all"),
            ("centred", "a centre of all ranks' rows, as DINO has it", "all"),
            ("whole", "items that are whole batches, as kohya has them", "all"),
            ("boxes", "torchvision's Faster R-CNN, lists of pictures", "vision"),
        )
    },
    "text_to_image": Program(
        title="diffusers, train_text_to_image.py, EMA, snr_gamma",
        words="{src}/diffusers/examples/text_to_image/train_text_to_image.py "
        "--pretrained_model_name_or_path {inputs}/diffusion --train_data_dir {inputs}/captions "
        "--resolution 32 --train_batch_size 4 --max_train_steps 20 --use_ema --snr_gamma 5 "
        "--output_dir out --seed 3 --learning_rate 1e-4 --checkpointing_steps 1000",
        packages=("diffusers", "accelerate"),
        by_row=True,
    ),
    "text_to_image_lora": Program(
        title="diffusers, train_text_to_image_lora.py",
        words="{src}/diffusers/examples/text_to_image/train_text_to_image_lora.py "
        "--pretrained_model_name_or_path {inputs}/diffusion --train_data_dir {inputs}/captions "
        "--resolution 32 --train_batch_size 4 --max_train_steps 16 --rank 4 "
        "--gradient_accumulation_steps 2 --output_dir out --seed 3 --learning_rate 1e-3 "
        "--checkpointing_steps 1000",
        packages=("diffusers", "accelerate", "peft"),
        by_row=True,
    ),
    "dreambooth": Program(
        title="diffusers, train_dreambooth.py",
        words="{src}/diffusers/examples/dreambooth/train_dreambooth.py "
        "--pretrained_model_name_or_path {inputs}/diffusion --instance_data_dir "
        "{inputs}/images/train/light --instance_prompt cat --resolution 32 "
        "--train_batch_size 4 --max_train_steps 20 --output_dir out --seed 3 "
        "--learning_rate 1e-4 --checkpointing_steps 1000",
        packages=("diffusers", "accelerate"),
        by_row=True,
    ),
    **LAUNCHED,
}
