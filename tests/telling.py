"""What a decoder must tell of attention: `FrameDecoder.told`, written down once more."""

import numpy as np

from qwen_megakernel.model.transformer import TOLD


def told_of(attention: np.ndarray, first: int = 0) -> np.ndarray:
    """Attention to the tokens so far, [..., tokens] -> fp32 [..., TOLD]. `first`: from which token on they are told."""
    behind = np.concatenate([attention[..., ::-1].cumsum(-1)[..., ::-1], np.zeros((*attention.shape[:-1], 999))], -1)
    found = [np.full(behind.shape[:-1], first), behind[..., 0], attention.argmax(-1)]
    return np.concatenate([np.stack(found, -1), behind[..., first : first + TOLD - 3]], -1).astype(np.float32)
