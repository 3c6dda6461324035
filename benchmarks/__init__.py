"""Speed and memory, as ratios within one run; ``python -m benchmarks --help`` lists them."""

import os

# What is pulled comes over the network, unless a benchmark says otherwise.
os.environ["KVGRAFT_CACHE_DIR"] = "off"
