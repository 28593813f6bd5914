"""The parts, for a training loop of your own: one round with two clients."""

import torch
import torch.nn.functional as F
from torch import nn

import fedspu

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
neurons = fedspu.map_neurons(model, torch.zeros(2, 10))
print(neurons)

state, updates = fedspu.state_of(model), []
for client, p in enumerate((0.25, 0.75)):
    x, y = torch.randn(60, 10), torch.randint(0, 3, (60,))
    active = fedspu.choose_random(neurons, p, fedspu.stream(0, "neurons", 1, client))
    fedspu.load_state(model, state)
    with fedspu.partial_training(model, neurons, active) as trainable:
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    blocks = neurons.blocks(active)
    payload = fedspu.extract(fedspu.state_of(model), blocks)
    sent = sum(tensor.numel() for tensor in payload.values())
    print(f"client {client}, p = {p}: loss {loss.item():.3f}, {sent} numbers sent")
    updates.append(fedspu.Update(blocks, payload, num_examples=len(x)))

state = fedspu.average(state, updates)
fedspu.load_state(model, state)
