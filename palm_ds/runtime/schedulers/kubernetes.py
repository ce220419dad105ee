"""Kubernetes: launch/k8s/pretrain.yaml filled in, by kubectl.

Recipe and DeepSpeed file go along in a ConfigMap, so that neither the image nor the volume needs
them. Service, Job and ConfigMap have the job's name.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

from palm_ds.common.errors import FAILED
from palm_ds.runtime.schedulers.job import ClusterJob, ClusterScheduler, called, lines_of

FOLDER = "/palm_ds_job"
"""Where the ConfigMap's files are in a pod."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_FIRST_POD = "batch.kubernetes.io/job-completion-index=0"
_KINDS = "job,service,configmap"


@dataclass(frozen=True, kw_only=True)
class Kubernetes(ClusterScheduler):
    """The cluster of kubectl's context, and the shipped file."""

    unknown_job = "(NotFound)"
    template: str
    image: str = ""
    """Of the pods; empty: the shipped file's, which nobody has."""
    claim: str = ""
    """The persistent volume claim that is mounted at /data; empty: the shipped file's."""
    files: Mapping[str, str] = field(default_factory=dict)
    """{name: text} of the ConfigMap."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of kubectl: {"namespace": "nlp"}."""
    pause: float = 2.0

    def filled(self, job: ClusterJob) -> str:
        service, work = yaml.safe_load_all(self.template)
        service["metadata"]["name"] = work["metadata"]["name"] = job.name
        service["spec"]["selector"]["job-name"] = job.name
        spec = work["spec"]
        pod = spec["template"]["spec"]
        pod["subdomain"] = job.name
        if job.nodes:
            crashes = spec["backoffLimit"] // spec["completions"]  # each is a failure of every pod
            spec["backoffLimit"] = crashes * job.nodes
            spec["completions"] = spec["parallelism"] = job.nodes
        (container,) = pod["containers"]
        self._fill_container(container, job, spec["completions"])
        for volume in pod["volumes"]:
            if self.claim and "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] = self.claim
        pod["volumes"].append({"name": "job", "configMap": {"name": job.name}})
        files = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": job.name},
            "data": dict(self.files),
        }
        return yaml.dump_all([service, files, work], Dumper=_Dumper, sort_keys=False)

    def _fill_container(self, container: dict[str, Any], job: ClusterJob, nodes: int) -> None:
        container["image"] = self.image or container["image"]
        limits = container["resources"]["limits"]
        limits["nvidia.com/gpu"] = job.gpus or limits["nvidia.com/gpu"]
        own = {
            "NODES": nodes,
            "SLOTS": limits["nvidia.com/gpu"],
            "RECIPE": job.recipe,
            "MACHINE": job.ds_config,
            "RUN_DIR": job.run_dir,
            "NAME": job.name,
            "PROGRAM": job.program,
        }
        for variable in container["env"]:
            variable["value"] = str(own.get(variable["name"], variable["value"]))
        container["args"] += job.overrides
        container["volumeMounts"].append({"name": "job", "mountPath": FOLDER})

    def submit(self, text: str) -> str:
        called(self._words("create", "--filename", "-"), text)  # `apply` would change a run
        (job,) = (each for each in yaml.safe_load_all(text) if each["kind"] == "Job")
        return job["metadata"]["name"]

    def follow(self, key: str, show: Callable[[str], None]) -> int:
        read, state = dict[str, str](), self._state(key)
        complete = set[str]()
        while True:
            pods = self.until_answered(partial(self._pods, key), show)
            for pod, ended in pods.items():
                if pod not in complete:
                    read[pod] = self._follow_log(pod, read.get(pod, ""), show)
                if ended:
                    complete.add(pod)
            if state:
                return 0 if state == "Complete" else FAILED
            time.sleep(self.pause)
            state = self.until_answered(partial(self._state, key), show)

    def _follow_log(self, pod: str, read: str, show: Callable[[str], None]) -> str:
        """Show a pod's lines after the one of the time `read`, until it ends or the connection
        does, as it may after some hours; returns the last line's time."""
        since = [f"--since-time={read}"] if read else []  # whole seconds: some are read again
        last = read
        for line in lines_of(self._words("logs", pod, "--follow", "--timestamps", *since)):
            time_of_line, _, text = line.partition(" ")
            if not _TIME.fullmatch(time_of_line):
                show(line)
            elif not read or _in_order(time_of_line) > _in_order(read):
                show(text)
                last = time_of_line
        return last

    def cancel(self, key: str) -> None:
        called(self._words("delete", _KINDS, key, "--ignore-not-found"))

    def _state(self, key: str) -> str:
        """Complete or Failed; empty while the job runs or waits. Raises UserError without it."""
        status = self._json("get", "job", key).get("status", {})
        ended = [
            each["type"]
            for each in status.get("conditions", [])
            if each["status"] == "True" and each["type"] in ("Complete", "Failed")
        ]
        return next(iter(ended), "")

    def _pods(self, key: str) -> dict[str, bool]:
        """The first machine's pods that have a log, and whether each has ended, in the order of
        their creation: those that were evicted before the one that runs."""
        found = self._json("get", "pods", "--selector", f"job-name={key},{_FIRST_POD}")["items"]
        started = [pod for pod in found if pod["status"]["phase"] not in ("Pending", "Unknown")]
        started.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
        return {pod["metadata"]["name"]: pod["status"]["phase"] != "Running" for pod in started}

    def _json(self, *words: str) -> dict[str, Any]:
        return json.loads(called(self._words(*words, "--output", "json")))

    def _words(self, *words: str) -> list[str]:
        options = [f"--{name}={value}" for name, value in self.options.items()]
        return ["kubectl", *options, *words]


def _in_order(time_of_line: str) -> tuple[str, str]:
    """A key by which times sort: the digits of their fractions differ in number."""
    second, _, fraction = time_of_line.removesuffix("Z").partition(".")
    return second, fraction.ljust(9, "0")


def _text(dumper: yaml.representer.BaseRepresenter, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines are written as such."""

    yaml_representers = {**yaml.SafeDumper.yaml_representers, str: _text}
