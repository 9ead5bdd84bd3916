"""Adapters: dash under the names and signatures that training stacks call.

dash.compat.flash_attn_3     FlashAttention-3's Python module (``flash_attn_interface``)
dash.compat.transformers     Hugging Face transformers: ``attn_implementation="dash"``
dash.compat.torch_attention  PyTorch's registry: SDPA, ``varlen_attn``, jagged NestedTensors
dash.compat.dtensor          DTensor's sharding rules of dash's operators

None is imported before it is asked for, and none changes anything before its function is called.
What dash cannot do raises ``dash.UnsupportedError``; no adapter falls back to another kernel.
"""
