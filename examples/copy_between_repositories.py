"""Copy an artifact from one repository to another; only what is missing travels, and the id stays.

python examples/copy_between_repositories.py http://10.0.0.1:8750 file:///var/lib/kvgraft handbook
"""

from __future__ import annotations

import argparse

from repo_service.client import open_repository
from repo_service.client.transfer import copy_artifact


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("destination")
    parser.add_argument("ref", help="artifact id or tag")
    parser.add_argument("--namespace", default="default")
    arguments = parser.parse_args()
    with open_repository(arguments.source) as source, open_repository(arguments.destination) as destination:
        report = copy_artifact(source, destination, arguments.ref, arguments.namespace, arguments.namespace)
    print(f"{report.artifact.id}: sent {report.bytes_sent} of {report.bytes_total} bytes")


if __name__ == "__main__":
    main()
