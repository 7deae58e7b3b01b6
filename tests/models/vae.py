"""A variational autoencoder: two heads for mean and log-variance, reparameterised with given noise, ReLU decoder."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, data, hidden, latent):
        super().__init__()
        self.fc1 = nn.Linear(data, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, data)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar, eps):
        std = torch.exp(0.5 * logvar)
        return mu + eps * std

    def decode(self, z):
        h3 = F.relu(self.fc3(z))
        return torch.sigmoid(self.fc4(h3))

    def forward(self, x, eps):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar, eps)
        return self.decode(z), mu, logvar


class RandomVAE(VAE):
    """The same, drawing its own noise as most people do."""

    def forward(self, x):
        mu, logvar = self.encode(x)
        return self.decode(self.reparameterize(mu, logvar, torch.randn_like(mu))), mu, logvar


def build(width=6):
    return VAE(5, width, 3), (torch.randn(2, 5), torch.randn(2, 3)), {}


def build_random(width=6):
    return RandomVAE(5, width, 3), (torch.randn(2, 5),), {}
