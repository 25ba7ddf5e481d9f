def require_torch_accelerator(test):
    return test
