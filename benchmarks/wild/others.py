"""x-transformers, models of tables, models of graphs."""

# ruff: noqa: E501  # lists of settings, one model after the other

from functools import partial
from typing import Any

import torch

from benchmarks.wild.zoo import Built, add, words


def _x_transformers(**settings: Any) -> Built:
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=99,
        max_seq_len=32,
        attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **settings),
    )
    return model, words()


for _name, _settings in [
    ("plain", {}), ("rotary", {"rotary_pos_emb": True}), ("alibi", {"alibi_pos_bias": True}),
    ("rel-pos", {"rel_pos_bias": True}), ("glu", {"ff_glu": True}), ("swish-glu",
                                                                     {"ff_glu": True,
                                                                      "ff_swish": True}),
    ("rmsnorm", {"use_rmsnorm": True}), ("kv-heads", {"attn_kv_heads": 2}),
    ("one-kv-head", {"attn_one_kv_head": True}), ("qk-norm", {"attn_qk_norm": True}),
    ("talking-heads", {"attn_pre_talking_heads": True}), ("sandwich", {"sandwich_norm": True}),
    ("gate-residual", {"gate_residual": True}), ("memory-kv", {"attn_num_mem_kv": 2}),
    ("dynamic-pos", {"dynamic_pos_bias": True}), ("gate-values", {"attn_gate_values": True}),
]:  # fmt: skip
    add("x-transformers", _name, partial(_x_transformers, **_settings))


def _tabular(name: str) -> Built:
    numbers = torch.randn(4, 6)
    if name in ("mlp", "resnet", "ft-transformer"):
        import rtdl_revisiting_models as rtdl

        if name == "mlp":
            return rtdl.MLP(
                d_in=6, d_out=3, n_blocks=2, d_block=16, dropout=0.1
            ), numbers
        if name == "resnet":
            return rtdl.ResNet(
                d_in=6, d_out=3, n_blocks=2, d_block=16, d_hidden=24,
                d_hidden_multiplier=None, dropout1=0.1, dropout2=0.0,
            ), numbers  # fmt: skip
        made = rtdl.FTTransformer(
            n_cont_features=6, cat_cardinalities=[], d_out=3, n_blocks=2, d_block=32,
            attention_n_heads=4, attention_dropout=0.1, ffn_d_hidden_multiplier=1.5,
            ffn_dropout=0.1, residual_dropout=0.0,
        )  # fmt: skip
        return made, (numbers, None)
    if name == "tabnet":
        from pytorch_tabnet.tab_network import TabNet

        mask = torch.eye(6)
        return TabNet(6, 3, group_attention_matrix=mask), torch.randn(8, 6)
    import tab_transformer_pytorch as tab

    words = torch.randint(0, 4, (4, 3))
    made = tab.FTTransformer(
        categories=(4, 5, 6), num_continuous=6, dim=32, dim_out=3, depth=2, heads=4
    )
    return made, (words, numbers)


for _name in ("mlp", "resnet", "ft-transformer", "tabnet", "tab-ft-transformer"):  # fmt: skip
    add("tabular", _name, partial(_tabular, _name))


def _graph(name: str, **settings: Any) -> Built:
    from torch_geometric.nn import models

    nodes = torch.randn(20, 6)
    edges = torch.randint(0, 20, (2, 60))
    model = getattr(models, name)(6, 16, 3, 3, **settings)
    return model, (nodes, edges)


for _name in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"):
    _settings = {}
    if _name == "PNA":
        _settings = {"aggregators": ["mean", "max"], "scalers": ["identity"],
                     "deg": torch.tensor([0, 5, 10, 5])}  # fmt: skip
    add("pyg", _name, partial(_graph, _name, **_settings))
    if _name in ("GCN", "GIN", "GraphSAGE"):
        add("pyg", f"{_name}-norm", partial(_graph, _name, norm="batch_norm", jk="cat"))
add("pyg", "GAT-heads", partial(_graph, "GAT", heads=4, v2=True))
