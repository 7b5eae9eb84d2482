"""What encrypting an update costs: seconds and bytes of encrypt, add, decrypt, and the error of the decrypted mean.

    python studies/programs/encryption.py            # 4 million values: about one minute of one core
    python studies/programs/encryption.py --millions 86.6 --sites 2 --only small

Three sites; the parameters of provisioning/ENCRYPTION.md ("small") beside FLARE's HEBuilder defaults ("flare").
The row "x 86.6 / n" is the measured time scaled to a ViT-B/16 of 86.6 million values: an extrapolation, exact in bytes.
"""

from __future__ import annotations

import time

import torch
from common import command_line, machine, rounded, say, table
from nvflare.lighter.impl.he import HEBuilder

from fedvlp.flare.encryption import Cipher

PARAMETERS = {
    "small": {"poly_modulus_degree": 4096, "coeff_mod_bit_sizes": [60, 49], "scale_bits": 30},
    "flare": {"poly_modulus_degree": 8192, "coeff_mod_bit_sizes": [60, 40, 40], "scale_bits": 40},
}
VIT = 86.6  # million values of a ViT-B/16


def measure(name: str, count: int, sites: int) -> dict[str, float]:
    """Seconds per step of one site (the server: per update), bytes of one update, largest error of the mean."""
    builder = HEBuilder(**PARAMETERS[name])
    builder.initialize(None, None)
    site, server = Cipher(builder.get_serialized_context(is_client=True)), Cipher(builder.get_serialized_context())
    weights = [200 * (place + 1) for place in range(sites)]
    generator = torch.Generator().manual_seed(0)
    plain = torch.zeros(count, dtype=torch.float64)
    seconds = {"encrypt": 0.0, "add": 0.0}
    total = torch.empty(0)
    size = 0
    for place, weight in enumerate(weights):
        values = torch.randn(count, generator=generator, dtype=torch.float64) * 0.1
        plain += weight * values
        began = time.perf_counter()
        rows = site.encrypt(values * weight)
        seconds["encrypt"] += (time.perf_counter() - began) / sites
        size = rows.numel()
        began = time.perf_counter()
        total = server.add(total, rows) if place else rows
        seconds["add"] += (time.perf_counter() - began) / max(1, sites - 1)
    began = time.perf_counter()
    mean = site.decrypt(total, count) / sum(weights)
    seconds["decrypt"] = time.perf_counter() - began
    error = float((mean - plain / sum(weights)).abs().max())
    return {**{step: rounded(value) for step, value in seconds.items()}, "bytes": size, "error": rounded(error)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--millions", type=float, default=4.0, help="values of an update, in millions")
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--only", choices=PARAMETERS)
    parser.add_argument("--quick", action="store_true", help="a tenth of a million values")
    given = parser.parse_args()
    torch.set_num_threads(1)
    millions = 0.1 if given.quick else given.millions
    say(machine())
    rows = []
    for name in [given.only] if given.only else list(PARAMETERS):
        figures = measure(name, round(millions * 1e6), given.sites)
        say({"parameters": name, "millions": millions, "sites": given.sites, **figures})
        scale = VIT / millions
        times = [figures[step] for step in ("encrypt", "add", "decrypt")]
        per_value = figures["bytes"] / (millions * 1e6)
        rows.append([name, f"{millions:g} M", *(f"{t:.1f}" for t in times), f"{per_value:.1f}", figures["error"]])
        if scale != 1:
            rows.append(
                [name, f"x {VIT:g} / {millions:g}", *(f"{t * scale:.0f}" for t in times), f"{per_value:.1f}", ""]
            )
    header = ["parameters", "values", "encrypt s", "add s per update", "decrypt s", "bytes per value", "largest error"]
    print(table(header, rows))
    say(machine())


if __name__ == "__main__":
    main()
