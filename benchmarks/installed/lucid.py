"""Train with the Trainer of denoising-diffusion-pytorch, as in its README: `lucid.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

if __name__ == "__main__":
    torch.manual_seed(3)
    model = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    diffusion = GaussianDiffusion(model, image_size=16, timesteps=100, sampling_timesteps=10)
    trainer = Trainer(
        diffusion,
        str(Path(sys.argv[1]) / "train"),
        train_batch_size=8,
        train_lr=1e-3,
        train_num_steps=20,
        gradient_accumulate_every=2,
        ema_decay=0.995,
        amp=False,
        calculate_fid=False,
        split_batches=True,
        save_and_sample_every=1000,
        results_folder="out",
    )
    trainer.train()
