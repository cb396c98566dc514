"""Small PyTorch trainings, as a user would write them, each with one known bottleneck."""

from __future__ import annotations

HEAD = """
import time
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

def plain_data(rows=2048, width=256):
    return TensorDataset(torch.randn(rows, width), torch.randint(10, (rows,)))

def training_data():
    return plain_data()

def plain_model(width=256, layers=3):
    hidden = [each for _ in range(layers) for each in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))

def build():
    model = plain_model()
    return model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
"""
PLAIN = HEAD
DEEPER = (
    HEAD
    + """
def build():
    model = plain_model(layers=8)
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), nn.CrossEntropyLoss()
"""
)
SLOW_ROWS = (
    HEAD
    + """
class Rows(Dataset):
    def __len__(self):
        return 20000

    def __getitem__(self, row):
        time.sleep(0.002)  # a picture from a slow disk
        return torch.randn(256), row % 10

def training_data():
    return Rows()
"""
)
SLOW_COLLATE = (
    HEAD
    + """
def collate(rows):
    until = time.perf_counter() + 0.05
    while time.perf_counter() < until:  # text is cut into tokens here, batch by batch
        pass
    return torch.stack([row for row, _ in rows]), torch.stack([label for _, label in rows])

def training_data():
    return plain_data(), {"collate_fn": collate}
"""
)
LARGE_OPTIMIZER = (
    HEAD
    + """
def build():
    model = nn.Sequential(nn.Embedding(30000, 64), nn.Flatten(), nn.Linear(64 * 8, 10))
    return model, torch.optim.Adam(model.parameters()), nn.CrossEntropyLoss()

def training_data():
    return TensorDataset(torch.randint(30000, (2048, 8)), torch.randint(10, (2048,)))
"""
)
SLEEPING_MODEL = (
    HEAD
    + """
class Sleeps(nn.Module):
    def forward(self, x):
        time.sleep(0.05)  # a lock, or a request to some server
        return x

def build():
    model = nn.Sequential(Sleeps(), plain_model())
    return model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
"""
)
MANY_LAUNCHES = (
    HEAD
    + """
def build():
    model = plain_model(width=64, layers=300)
    return model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()

def training_data():
    return plain_data(width=64)
"""
)
# its passes read many weights, so a few rows take as long as some more
LARGE_WEIGHTS = (
    HEAD
    + """
def build():
    model = plain_model(width=6144, layers=12)
    return model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()

def training_data():
    return plain_data(width=6144, rows=512)
"""
)
CONVOLUTIONS = (
    HEAD
    + """
SIZE = 32 if torch.cuda.is_available() else 16
WIDTH = 256 if torch.cuda.is_available() else 8

class Pictures(Dataset):
    def __init__(self):
        self.kept = torch.randn(256, 3, SIZE, SIZE)

    def __len__(self):
        return 8192

    def __getitem__(self, row):
        return self.kept[row % 256], row % 10

def training_data():
    return Pictures(), {"num_workers": 4}

def build():
    def block(inputs, outputs):
        return nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()

    layers = (*block(3, WIDTH), *block(WIDTH, 2 * WIDTH), nn.MaxPool2d(2))
    more = (*block(2 * WIDTH, 2 * WIDTH), *block(2 * WIDTH, 2 * WIDTH), nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(*layers, *more, nn.Flatten(), nn.Linear(2 * WIDTH, 10))
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), nn.CrossEntropyLoss()
"""
)
ROWS_ON_DEVICE = (
    HEAD
    + """
PLACE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 4096 if torch.cuda.is_available() else 512

def training_data():
    return TensorDataset(*(each.to(PLACE) for each in plain_data(rows=8192, width=WIDTH).tensors))

def build():
    model = plain_model(width=WIDTH, layers=6)
    return model, torch.optim.SGD(model.parameters(), 0.01), nn.CrossEntropyLoss()
"""
)
# its optimizer's update takes the same time whatever the batch
MANY_WEIGHTS = (
    HEAD
    + """
WIDTH = 4096 if torch.cuda.is_available() else 512

def training_data():
    return plain_data(rows=4096, width=WIDTH)

def build():
    model = plain_model(width=WIDTH, layers=12)
    return model, torch.optim.Adam(model.parameters(), foreach=False), nn.CrossEntropyLoss()
"""
)
TRAINER = """
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

class Texts(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, row):
        words = torch.arange(row, row + 128) % 1000
        return {"input_ids": words, "labels": words}

def build():
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    arguments = TrainingArguments("/tmp/trainer", report_to=[], per_device_train_batch_size=8)
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=Texts())
"""
