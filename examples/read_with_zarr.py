"""Read an artifact with zarr-python alone: from an export, or over HTTP from a running service.

kvgraft export handbook /tmp/handbook.zarr
python examples/read_with_zarr.py /tmp/handbook.zarr
python examples/read_with_zarr.py http://127.0.0.1:8750/v1/artifacts/handbook/zarr
"""

from __future__ import annotations

import sys

import numpy as np
import zarr


def main() -> None:
    group = zarr.open_group(sys.argv[1], mode="r")
    print(group.attrs["artifact_id"], group.attrs["token_count"], "tokens")
    for name, layer_group in group.groups():
        for array_name, array in layer_group.arrays():
            block = array[0]
            if array.attrs["kvgraft_dtype"] == "bfloat16":
                # bfloat16 is the upper half of float32.
                block = (block.astype(np.uint32) << 16).view(np.float32)
            print(f"{name}/{array_name}: {array.shape}, first block from {block.min():.3g} to {block.max():.3g}")


if __name__ == "__main__":
    main()
