def infer_device():
    return "cuda"


def is_npu_available():
    return False
