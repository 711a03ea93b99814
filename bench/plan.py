"""The measurements, their references and their thresholds: the promises of SPECIFICATION.md as data."""

import dataclasses
from typing import Optional

from harness import perftest

# UDP payload of one packet: BTH 12, RETH 16, AETH 4, ICRC 4 bytes and the data.
READ_REQUEST = 12 + 16 + 4
READ_RESPONSE_4K = 12 + 4 + 4096 + 4
WRITE_8 = 12 + 16 + 8 + 4
SEGMENT_4K = READ_RESPONSE_4K


def round_trip(request, reply):
    return ("rtt", "--request", str(request), "--reply", str(reply))


def stream(segment):
    return ("stream", "--segment", str(segment))


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A perftest run, and the bare UDP run that is its reference."""

    name: str
    tool: str
    options: tuple
    value: callable  # from a row of perftest's table
    unit: str
    reference: tuple  # arguments of udp_reference
    reference_value: callable  # from its JSON object, in the same unit
    less_is_better: bool
    # Threshold and target apply to the ratio to the reference, or to the value if `absolute`.
    threshold: float
    target: Optional[float] = None
    absolute: bool = False

    def judged(self, value, ratio):
        return value if self.absolute else ratio

    def satisfies(self, judged, limit):
        return judged <= limit if self.less_is_better else judged >= limit


def data_gb_s(row):
    return perftest.average_mib_s(row) * (1 << 20) / 1e9


def stream_data_gb_s(reference):
    return reference["bytes_per_second"] / 1e9 * 4096 / SEGMENT_4K


def thousand_messages(row):
    return perftest.messages_per_s(row) / 1e3


def thousand_packets(reference):
    return reference["packets_per_second"] / 1e3


LATENCY = dict(value=perftest.typical_us, unit="us", less_is_better=True, threshold=2.0, target=1.3)
BANDWIDTH = dict(value=data_gb_s, unit="GB/s", reference=stream(SEGMENT_4K), reference_value=stream_data_gb_s,
                 less_is_better=False, threshold=0.3, target=0.6)
RATE = dict(value=thousand_messages, unit="k/s", reference_value=thousand_packets, less_is_better=False, absolute=True)

MEASUREMENTS = [
    Measurement("READ 4 KiB latency", "ib_read_lat", ("-s", "4096", "-n", "20000"),
                reference=round_trip(READ_REQUEST, READ_RESPONSE_4K), reference_value=lambda it: it["rtt_us_p50"], **LATENCY),
    # perftest prints half of a WRITE round trip.
    Measurement("WRITE 8 B latency", "ib_write_lat", ("-s", "8", "-n", "20000"),
                reference=round_trip(WRITE_8, WRITE_8), reference_value=lambda it: it["rtt_us_p50"] / 2, **LATENCY),
    Measurement("READ 64 KiB bandwidth", "ib_read_bw", ("-s", "65536", "-n", "20000"), **BANDWIDTH),
    Measurement("WRITE 64 KiB bandwidth", "ib_write_bw", ("-s", "65536", "-n", "20000"), **BANDWIDTH),
    Measurement("READ 4 KiB, depth 16", "ib_read_bw", ("-s", "4096", "-t", "16", "-o", "16", "-n", "100000", "-N"),
                reference=stream(SEGMENT_4K), threshold=200.0, target=226.0, **RATE),
    Measurement("WRITE 8 B messages", "ib_write_bw", ("-s", "8", "-n", "200000", "-N"),
                reference=stream(WRITE_8), threshold=400.0, **RATE),
    Measurement("SEND 8 B messages", "ib_send_bw", ("-s", "8", "-n", "200000", "-N"),
                reference=stream(WRITE_8), threshold=400.0, **RATE),
]

# Registration: the limit for 64 GiB in microseconds, and its limit as a multiple of the time for 4 KiB.
REGISTRATION_LARGE_BYTES = 64 << 30
REGISTRATION_SMALL_BYTES = 4096
REGISTRATION_US_MAX = 50.0
REGISTRATION_RATIO_MAX = 2.0
