"""Labelled sets whose features are given instead of pictures, and an encoder that reads them."""

import torch
from torch import nn


class GivenFeatures:
    """A labelled set of features, (num_pictures, ...); the pictures `broken` cannot be read."""

    def __init__(self, name, features, labels, class_names="abc", broken=()):
        self.name = self.fingerprint = name
        self.features, self.labels, self.class_names = features, labels, [*class_names]
        self.readable = torch.tensor([index not in broken for index in range(len(features))])

    def __len__(self):
        return len(self.features)

    def label(self, index):
        return int(self.labels[index])


class ReadsFeatures:
    """As an Encoder of GivenFeatures."""

    model, device, preprocessing = nn.Identity(), torch.device("cpu"), {}

    def images(self, data_set):
        return data_set.features, data_set.readable
