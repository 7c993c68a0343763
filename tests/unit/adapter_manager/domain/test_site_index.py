"""Names of modules against the schema's places, also names that nobody wrote by hand."""

import time

from adapter_manager.domain.site_index import PairForm, SiteIndex
from tests.support.lora_schemas import SCHEMAS


def test_experts_are_found_by_every_form_of_their_names() -> None:
    """The index stands before the projection, or at the end."""
    index = SiteIndex(SCHEMAS["mixtral"]())
    for root in ("model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe.experts"):
        for name, form in {
            f"{root}.3.w1": PairForm.PER_EXPERT,
            f"{root}.3.up_proj": PairForm.PER_EXPERT,
            f"{root}.3.gate_up_proj": PairForm.PER_EXPERT_WHOLE,
            f"{root}.down_projs.3": PairForm.PER_EXPERT_WHOLE,
        }.items():
            place = index.find(name)
            assert place is not None, name
            assert (place.form, place.expert, place.site.layer) == (form, 3, 1)
    for name in ("model.layers.1.mlp.experts.w1.3", "3", "", "model.layers.1.mlp.experts.03.w1"):
        assert index.find(name) is None, name


def test_a_name_of_many_numbers_costs_no_more_than_another() -> None:
    """Each number could be an expert's index; only those where a template has one are tried."""
    index = SiteIndex(SCHEMAS["qwen3_moe"]())
    numbers, plain = "0." * 254 + "1", "x." * 254 + "y"

    def seconds(name: str) -> float:
        start_s = time.process_time()
        for _ in range(300):
            assert index.find(name) is None
        return time.process_time() - start_s

    # Trying all of them takes 200 times as long.
    assert min(seconds(numbers) for _ in range(5)) < 40 * max(min(seconds(plain) for _ in range(5)), 1e-4)
