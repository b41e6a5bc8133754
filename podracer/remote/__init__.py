"""Environments on other machines (SEED RL, https://arxiv.org/abs/1910.06591).

A *worker* holds environments and no weights. It connects to the learner's machine, and then only
answers actions with what its environments return, many environments a message.

1. ``wire``: messages, as bytes.
2. ``access``: who may connect: certificates, a token, and where a server listens.
3. ``server``: the gRPC server, which hands messages to a ``Handler``.
4. ``pools``: environments that are stepped in threads.
5. ``worker``: the worker, which connects pools and server.
"""
