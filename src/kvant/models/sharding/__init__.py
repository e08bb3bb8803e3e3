"""Divides a model among several devices: each weight, and each layer's heads."""
