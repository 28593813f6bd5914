"""Models that nobody looked at while mapping was written: how well causes were mended.

All test models of timm, and all texts and causal models of Hugging Face that are not in
``hugging_face.py`` and can be built small by the settings that are used there.
"""

from functools import partial

from benchmarks.wild.hugging_face import build, texts
from benchmarks.wild.vision import timm_model
from benchmarks.wild.zoo import add

_SEQ, _LM = "AutoModelForSequenceClassification", "AutoModelForCausalLM"
for _kind in (
    "arcee", "doge", "esm", "esmc", "eurobert", "flaubert", "glm4", "gpt-sw3", "gte",
    "jamba", "jetmoe", "jina_embeddings_v3", "markuplm", "minicpm3",
    "modernbert-decoder", "nomic_bert", "olmo3", "roberta-prelayernorm", "ultrabert",
    "xlm", "xlm-roberta-xl",
):  # fmt: skip
    add("held-out-hf", f"text-{_kind}", partial(build, _SEQ, _kind, texts))
for _kind in (
    "apertus", "arcee", "aria_text", "bert-generation", "bigbird_pegasus",
    "blenderbot-small", "cohere2", "cohere2_moe", "cpmant", "doge", "flex_olmo",
    "flint", "fuyu", "gemma4_unified_text", "glm4", "gpt-sw3", "gpt_neox_japanese",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "hrm_text",
    "hyperclovax", "internlm3", "jais2", "jamba", "jetmoe", "lfm3", "marian",
    "minicpm3", "modernbert-decoder", "moshi", "mvp", "nanochat", "olmo3",
    "olmo_hybrid", "pegasus", "roberta-prelayernorm", "trocr", "vaultgemma", "xlm",
    "xlm-roberta-xl", "youtu",
):  # fmt: skip
    add("held-out-hf", f"causal-{_kind}", partial(build, _LM, _kind, texts))
for _name in (
    "byobnet", "coatnet", "convnext", "convnext2", "convnext3", "efficientnet",
    "efficientnet_evos", "efficientnet_gn", "efficientnet_ln", "mambaout", "maxvit",
    "nfnet", "resnet", "vit", "vit2", "vit3", "vit4", "vit_relpos",
):  # fmt: skip
    add("held-out-timm", _name, partial(timm_model, f"test_{_name}", 160))
