"""Graph layers written out: graph convolution with a normalised adjacency, graph attention with two score vectors."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphConvolution(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_features, out_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        return torch.mm(adj, support) + self.bias


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass):
        super().__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        return F.log_softmax(self.gc2(x, adj), dim=1)


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, alpha, concat=True):
        super().__init__()
        self.out_features, self.concat = out_features, concat
        self.W = nn.Parameter(torch.randn(in_features, out_features))
        self.a = nn.Parameter(torch.randn(2 * out_features, 1))
        self.leakyrelu = nn.LeakyReLU(alpha)

    def forward(self, h, adj):
        wh = torch.mm(h, self.W)
        left = torch.matmul(wh, self.a[: self.out_features, :])
        right = torch.matmul(wh, self.a[self.out_features :, :])
        e = self.leakyrelu(left + right.T)
        attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e))
        h_prime = torch.matmul(F.softmax(attention, dim=1), wh)
        return F.elu(h_prime) if self.concat else h_prime


class GAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, heads):
        super().__init__()
        self.attentions = nn.ModuleList([GraphAttentionLayer(nfeat, nhid, 0.2) for _ in range(heads)])
        self.out_att = GraphAttentionLayer(nhid * heads, nclass, 0.2, concat=False)

    def forward(self, x, adj):
        x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
        return self.out_att(x, adj)


class SageScatter(nn.Module):
    """Mean over neighbours by scattering along an edge list, as libraries of graph layers do."""

    def __init__(self, nfeat, nhid, nclass):
        super().__init__()
        self.self1, self.neigh1 = nn.Linear(nfeat, nhid), nn.Linear(nfeat, nhid, bias=False)
        self.self2, self.neigh2 = nn.Linear(nhid, nclass), nn.Linear(nhid, nclass, bias=False)

    def mean(self, x, edges):
        source, target = edges
        total = torch.zeros_like(x).index_add(0, target, x[source])
        degree = torch.zeros(x.shape[0], 1, dtype=x.dtype).index_add(
            0, target, torch.ones(len(source), 1, dtype=x.dtype)
        )
        return total / degree.clamp(min=1)

    def forward(self, x, edges):
        x = F.relu(self.self1(x) + self.neigh1(self.mean(x, edges)))
        return self.self2(x) + self.neigh2(self.mean(x, edges))


def adjacency(n=5):
    ring = torch.eye(n) + torch.roll(torch.eye(n), 1, 0) + torch.roll(torch.eye(n), -1, 0)
    return ring / ring.sum(1, keepdim=True)


def build(width=4):
    return GCN(3, width, 3), (torch.randn(5, 3), adjacency()), {}


def build_gat(width=3):
    return GAT(3, width, 3, 2), (torch.randn(5, 3), adjacency()), {}


def build_scatter(width=4):
    edges = torch.tensor([[0, 1, 2, 3, 4, 0, 2, 4], [1, 2, 3, 4, 0, 2, 0, 1]])
    return SageScatter(3, width, 2), (torch.randn(5, 3), edges), {}
