"""One model on several devices: who holds which part of each weight, and of each layer's heads."""
