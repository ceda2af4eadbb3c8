"""Kubernetes: from a model's plan to a pod that holds it. Sizes, renders and checks manifests; talks to no cluster.

An honest word first, which every page here keeps to: MIG isolates; a preloaded limiter is cooperation; MPS limits each
client and shares faults; time-slicing limits nothing. Kubernetes itself counts whole devices and no bytes.
"""
