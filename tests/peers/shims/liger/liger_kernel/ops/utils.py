def is_hip():
    return False
