from liger_kernel.megatron import LigerVocabParallelCrossEntropy  # noqa: F401
