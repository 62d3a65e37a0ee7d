"""twostep report | info"""

import argparse
import sys

from twostep import Error, info


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="twostep", description="The Python side of twostep.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="devices, libraries and folders that twostep found")
    report = commands.add_parser("report", help="pictures and one HTML page of bench rows; needs matplotlib")
    report.add_argument("rows", nargs="+", help="files that `twostep bench gemm` and `bench kda` wrote with --json")
    report.add_argument("--out", default="report", help="folder for gemm.png, kda.png and report.html (report)")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "info":
            for name, value in info().items():
                print(f"{name:12} {value}")
        else:
            from twostep.report import write_report

            for path in write_report(chosen.rows, chosen.out):
                print(path)
    except (Error, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
