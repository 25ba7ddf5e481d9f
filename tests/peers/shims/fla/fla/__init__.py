"""fla's names on fused_softmax; utils/_testing.py and utils/_config.py come from its checkout."""
