"""The short part of the fault campaign: `python tests/faults/campaign.py` is the long one."""

from pathlib import Path

from campaign import campaign


def test_nothing_is_lost_beyond_the_last_commit_and_no_loss_is_wrong(tmp_path: Path) -> None:
    report = campaign(tmp_path, seconds=15, seed=3, layout="fsdp", num_hosts=1)
    assert report.is_good and report.num_faults >= 2, report.table()


def test_without_recovery_the_campaign_fails(tmp_path: Path) -> None:
    report = campaign(tmp_path, seconds=5, seed=3, layout="ddp", num_hosts=1, recover=False)
    assert not report.is_good and not report.is_complete
