"""A metrics endpoint as a scraper sees it: real HTTP, read with prometheus_client's own parsers."""

import urllib.request
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# What Prometheus 3 sends.
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


@dataclass(frozen=True)
class Scrape:
    """One answer."""

    content_type: str
    text: str
    families: dict[str, Metric]

    def samples(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Values by labels, of the samples of one name."""
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name
        }

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values by one label, summed over the others."""
        found: dict[str, float] = {}
        for labels, value in self.samples(name).items():
            key = dict(labels)[label]
            found[key] = found.get(key, 0) + value
        return found

    def value(self, name: str, **labels: str) -> float:
        """The one sample of these labels among others; 0 where there is none, as `rate` sees it."""
        found = [v for k, v in self.samples(name).items() if labels.items() <= dict(k).items()]
        assert len(found) <= 1, (name, labels, self.samples(name))
        return found[0] if found else 0.0

    def labels(self, name: str) -> dict[str, str]:
        """The labels of the only sample of this name."""
        (labels,) = self.samples(name)
        return dict(labels)


def scrape(address: str, accept: str | None = None, query: str = "") -> Scrape:
    """GET /metrics; `accept` None negotiates nothing."""
    headers = {} if accept is None else {"Accept": accept}
    request = urllib.request.Request(f"http://{address}/metrics{query}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        content_type, text = response.headers["Content-Type"], response.read().decode()
    read = read_openmetrics if content_type.startswith("application/openmetrics-text") else read_text
    families = list(read(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "a family stands in two places"
    return Scrape(content_type, text, {family.name: family for family in families})
