import enum

AttnMaskType = enum.Enum("AttnMaskType", ["padding", "causal"])
