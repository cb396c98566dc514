"""Train a UNet as in MONAI's tutorial on DistributedDataParallel, on random volumes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.nets import UNet
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler


def main() -> None:
    """Train in float64, because Adam amplifies the rounding errors of zero gradients."""
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    drawn = torch.Generator().manual_seed(1)
    rows = [
        {
            "img": torch.randn(1, 8, 8, 8, generator=drawn),
            "seg": (torch.randn(1, 8, 8, 8, generator=drawn) > 0).double(),
        }
        for _ in range(80)
    ]
    data = Dataset(data=rows)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, shuffle=False, num_workers=1, sampler=sampler)
    model = DistributedDataParallel(
        UNet(spatial_dims=3, in_channels=1, out_channels=1, channels=(4, 8), strides=(2,))
    )
    loss_function = DiceLoss(sigmoid=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        epoch_loss = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = loss_function(model(batch["img"]), batch["seg"])
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item()
        print(f"epoch {epoch}: {epoch_loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
