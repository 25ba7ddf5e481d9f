class TransformerConfig:
    """Its tests import it and make none."""
