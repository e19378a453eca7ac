"""moto's CloudFormation, made to behave: what AWS does where moto skips, mixes up or forgets.

Replaced here, each because the real CDK CLI or a real template meets it:
- a type that isn't known fails (moto warns and says CREATE_COMPLETE);
- an unknown Fn::GetAtt fails (moto drops the property);
- a failed create or update is rolled back, with an event that carries the reason (moto answers HTTP 500); what is to
  be retained stays, and a stack whose creation failed can only be deleted;
- resources are made in dependency order, DependsOn included, and destroyed in the reverse;
- updates go by a resource's own rule: in place, or replacement (moto forgets a resource without an update method);
- change sets are looked up by stack and name (the CLI gives every stack's the same name);
- exports follow change sets too, and can't be taken away while they are imported;
- termination protection protects.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from botocore.exceptions import ClientError, ParamValidationError
from moto.backends import get_backend
from moto.cloudformation import models as cfn_models
from moto.cloudformation import parsing
from moto.cloudformation.exceptions import ValidationError
from moto.cloudformation.models import ChangeSet, CloudFormationBackend, Event, Stack
from moto.cloudformation.parsing import ResourceMap
from moto.cloudformation.responses import CloudFormationResponse
from moto.core.exceptions import ServiceException
from moto.core.responses import ActionResult, EmptyResult

from trainyard.emulator.cloudformation.catalogue import RESOURCE_TYPES
from trainyard.emulator.cloudformation.model import UnsupportedPropertyError
from trainyard.emulator.cloudformation.registry import ManagedResource, model_classes

_deploy_lock = threading.RLock()
"""One deployment at a time: moto's registries are plain dictionaries, and `cdk deploy --concurrency` is parallel."""


class _DeploymentFailed(Exception):
    """A stack operation that failed and was rolled back; the stack's events hold the reason."""

    def __init__(self, reason: str, *, is_undone: bool) -> None:
        super().__init__(reason)
        self.is_undone = is_undone


class _ChangeSetNotFound(ServiceException):  # type: ignore[misc]  # moto's classes are untyped here
    code = "ChangeSetNotFound"


def install() -> None:
    """Replace the parts of moto's CloudFormation that this module improves."""
    parsing.resource_class_from_type = _resource_class
    parsing.resource_name_property_from_type = _name_property
    parsing.clean_json = _resolve
    backend: Any = CloudFormationBackend
    backend.create_stack = _create_stack
    backend.update_stack = _update_stack
    backend.delete_stack = _delete_stack
    backend.create_change_set = _create_change_set
    backend.execute_change_set = _execute_change_set
    backend.describe_stacks = _describe_stacks
    response: Any = CloudFormationResponse
    response.describe_change_set = _describe_change_set
    response.execute_change_set = _execute_change_set_action
    response.delete_change_set = _delete_change_set
    response.update_termination_protection = _update_termination_protection
    response.describe_events = _describe_events
    model_classes()


# ---- templates -------------------------------------------------------------------------------------------


def _resource_class(resource_type: str) -> Any:
    model = model_classes().get(resource_type)
    if model is None:
        raise ValidationError(message=f"Template format error: Unrecognized resource types: [{resource_type}]")
    return model


def _name_property(resource_type: str) -> str | None:
    known = RESOURCE_TYPES.get(resource_type)
    return known.name_property or None if known else None


_MOST: Mapping[str, int] = {"Resources": 500, "Parameters": 200, "Outputs": 200, "Mappings": 200}
"""What a template may hold (CloudFormation quotas)."""


def _require_sound(template: Mapping[str, Any]) -> None:
    for section, most in _MOST.items():
        number = len(template.get(section, {}))
        if number > most:
            raise ValidationError(
                message=f"Template format error: Number of {section.lower()}, {number}, is greater than maximum "
                f"allowed, {most}"
            )
    types = {resource["Type"] for resource in template.get("Resources", {}).values()}
    unknown = sorted(types - set(RESOURCE_TYPES))
    if unknown:
        raise ValidationError(
            message=f"Template format error: Unrecognized resource types: [{', '.join(unknown)}]: "
            "the emulator doesn't know them; `python -m trainyard.emulator types` lists those it knows"
        )


_moto_resolve = parsing.clean_json


def _resolve(value: Any, resources: ResourceMap) -> Any:
    """moto's resolution of intrinsics, but an unknown attribute or reference is an error, never dropped."""
    if isinstance(value, dict) and "Fn::GetAtt" in value:
        target = value["Fn::GetAtt"]
        logical_id, attribute = target.split(".", 1) if isinstance(target, str) else (target[0], ".".join(target[1:]))
        resource = resources.get(logical_id)
        if resource is None:
            raise ValidationError(
                message=f"Template error: instance of Fn::GetAtt references undefined resource {logical_id}"
            )
        return resource.get_cfn_attribute(attribute)
    if isinstance(value, list):
        return [item for item in (_resolve(item, resources) for item in value) if item is not None]  # AWS::NoValue
    if isinstance(value, str) and "{{resolve:" in value:
        return _read_references(value, resources)
    return _moto_resolve(value, resources)


def _read_references(text: str, resources: ResourceMap) -> str:
    """The text with the newest value of each SSM parameter that it refers to; nothing else can be read so here."""

    def value(found: re.Match[str]) -> str:
        service, _, name = found[1].partition(":")
        if service != "ssm" or not name or ":" in name:
            raise ValidationError(
                message=f"the emulator knows no dynamic reference but {{{{resolve:ssm:NAME}}}}: {text}"
            )
        parameters = get_backend("ssm")[resources._account_id][resources._region_name]
        parameter = parameters.get_parameter(name)
        if parameter is None:
            raise ValidationError(
                message=f"Parameters: [ssm:{name}] cannot be found: aws ssm put-parameter --name {name} --type String "
                "--value VALUE makes it (here after `trainyard emulator environment`)"
            )
        return str(parameter.value)

    return re.sub(r"\{\{resolve:([^}]*)\}\}", value, text)


def _references(value: Any) -> Iterator[str]:
    """Logical ids that a piece of template refers to by Ref, Fn::GetAtt or Fn::Sub."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "Ref" and isinstance(item, str):
                yield item
            elif key == "Fn::GetAtt":
                yield item.split(".")[0] if isinstance(item, str) else item[0]
            elif key == "Fn::Sub":
                text = item[0] if isinstance(item, list) else item
                for part in text.split("${")[1:]:
                    yield part.split("}")[0].split(".")[0]
                yield from _references(item[1] if isinstance(item, list) else {})
            else:
                yield from _references(item)
    elif isinstance(value, list):
        for item in value:
            yield from _references(item)


def _in_dependency_order(resources: Mapping[str, Any]) -> list[str]:
    order: list[str] = []
    state: dict[str, str] = {}

    def visit(logical_id: str, trail: tuple[str, ...]) -> None:
        if state.get(logical_id) == "done":
            return
        if state.get(logical_id) == "open":
            raise ValidationError(message=f"Circular dependency between resources: [{', '.join((*trail, logical_id))}]")
        state[logical_id] = "open"
        resource = resources[logical_id]
        depends = resource.get("DependsOn", [])
        before = [depends] if isinstance(depends, str) else list(depends)
        for other in (*before, *_references(resource.get("Properties", {}))):
            if other in resources and other != logical_id:
                visit(other, (*trail, logical_id))
        state[logical_id] = "done"
        order.append(logical_id)

    for logical_id in resources:
        visit(logical_id, ())
    return order


# ---- applying a template ----------------------------------------------------------------------------------


def _event(
    stack: Stack, logical_id: str, physical_id: str, resource_type: str, status: str, reason: str | None = None
) -> None:
    stack.events.append(
        Event(
            stack_id=stack.stack_id,
            stack_name=stack.name,
            logical_resource_id=logical_id,
            physical_resource_id=physical_id,
            resource_type=resource_type,
            resource_status=status,
            resource_status_reason=reason,
            resource_properties=None,
        )
    )


def _explain(error: Exception) -> str:
    if isinstance(error, ClientError):
        details = error.response["Error"]
        code = details.get("Code")
        return f"{details.get('Message') or code} (service error {code} in {error.operation_name})"
    if isinstance(error, UnsupportedPropertyError | ParamValidationError | ServiceException):
        return " ".join(str(getattr(error, "message", None) or error).split())
    return f"{type(error).__name__}: {error}"


class _Operation:
    """One change of a stack to a new template, undone again when a part of it fails."""

    def __init__(self, stack: Stack, template_text: str, parameters: dict[str, Any] | None) -> None:
        self.stack = stack
        self.map: ResourceMap = stack.resource_map
        self.old_template: dict[str, Any] = self.map._template or {}
        self.old_resources: dict[str, Any] = dict(self.map._resource_json_map)
        self.old_parameters = dict(self.map.input_parameters or {})
        self.text = template_text
        self.template = Stack.parse_template(template_text)
        self.parameters = parameters or {}
        self._undo: list[Callable[[], None]] = []
        self._cleanup: list[Callable[[], None]] = []

    def run(self) -> None:
        """Apply; on any failure undo what was done and raise _DeploymentFailed."""
        current = ""
        try:
            self._load(self.template, self.parameters)
            for current in _in_dependency_order(self.template.get("Resources", {})):
                self._apply(current)
            current = ""
            self._check_exports()
        except Exception as error:  # whatever a handler raises is the reason of a failed stack, not of a failed server
            reason = _explain(error)
            kind = self.template.get("Resources", {}).get(current, {}).get("Type", "AWS::CloudFormation::Stack")
            verb = "UPDATE" if current in self.old_resources or (not current and self.old_resources) else "CREATE"
            _event(self.stack, current or self.stack.name, "", kind, f"{verb}_FAILED", reason)
            is_undone = self._roll_back()
            raise _DeploymentFailed(reason, is_undone=is_undone) from error
        self._remove_what_is_gone()
        for clean in self._cleanup:
            clean()
        self._publish()

    def _load(self, template: dict[str, Any], parameters: dict[str, Any]) -> None:
        for name in (
            *template.get("Parameters", {}),
            *self.old_template.get("Parameters", {}),
            *self.old_template.get("Mappings", {}),
        ):
            self.map._parsed_resources.pop(name, None)
        self.map._template = template
        self.map._resource_json_map = template.get("Resources", {})
        self.map.input_parameters = parameters
        self.map.resolved_parameters = {}
        self.map.load()

    def _apply(self, logical_id: str) -> None:
        definition = self.template["Resources"][logical_id]
        condition = definition.get("Condition")
        if condition and not self.map.lazy_condition_map[condition]:
            return
        existing = self.map._parsed_resources.get(logical_id)
        if existing is None:
            self._create(logical_id)
            return
        assert isinstance(existing, ManagedResource)
        new = _resolve(definition.get("Properties", {}), self.map)
        if new != existing.properties:
            if existing.replaced_by_change(new):
                self._replace(logical_id, existing)
            else:
                self._change(logical_id, existing, new)

    def _create(self, logical_id: str) -> ManagedResource:
        kind = self.template["Resources"][logical_id]["Type"]
        _event(self.stack, logical_id, "", kind, "CREATE_IN_PROGRESS")
        resource: Any = self.map[logical_id]
        assert isinstance(resource, ManagedResource)
        self._undo.append(lambda: self._take_back(logical_id, resource))
        _event(self.stack, logical_id, resource.physical_resource_id, kind, "CREATE_COMPLETE")
        return resource

    def _take_back(self, logical_id: str, resource: ManagedResource) -> None:
        """Undo a creation. What says Retain stays even so: RetainExceptOnCreate is for those that shouldn't."""
        if self.template["Resources"][logical_id].get("DeletionPolicy") != "Retain":
            self._destroy(logical_id, resource)
            return
        _event(self.stack, logical_id, resource.physical_resource_id, resource.spec.name, "DELETE_SKIPPED")
        self.map._parsed_resources.pop(logical_id, None)

    def _replace(self, logical_id: str, old: ManagedResource) -> None:
        parsed = self.map._parsed_resources
        _require_free_name(logical_id, old, self.template["Resources"][logical_id])
        reason = "Requested update requires the creation of a new physical resource; hence creating one."
        _event(self.stack, logical_id, old.physical_resource_id, old.spec.name, "UPDATE_IN_PROGRESS", reason)
        del parsed[logical_id]
        self._undo.append(lambda: parsed.__setitem__(logical_id, old))
        replacement = self._create(logical_id)
        retained = self.template["Resources"][logical_id].get("UpdateReplacePolicy") == "Retain"
        if not retained and replacement.physical_resource_id != old.physical_resource_id:
            self._cleanup.append(lambda: old.delete(self.stack.account_id, self.stack.region_name))

    def _change(self, logical_id: str, resource: ManagedResource, new: Mapping[str, Any]) -> None:
        old = resource.properties
        account, region = self.stack.account_id, self.stack.region_name
        _event(self.stack, logical_id, resource.physical_resource_id, resource.spec.name, "UPDATE_IN_PROGRESS")
        self._undo.append(lambda: resource.change(old, account, region))
        resource.change(new, account, region)
        _event(self.stack, logical_id, resource.physical_resource_id, resource.spec.name, "UPDATE_COMPLETE")

    def _destroy(self, logical_id: str, resource: ManagedResource) -> None:
        physical_id, kind = resource.physical_resource_id, resource.spec.name
        _event(self.stack, logical_id, physical_id, kind, "DELETE_IN_PROGRESS")
        resource.delete(self.stack.account_id, self.stack.region_name)
        self.map._parsed_resources.pop(logical_id, None)
        _event(self.stack, logical_id, physical_id, kind, "DELETE_COMPLETE")

    def _remove_what_is_gone(self) -> None:
        kept = self.template.get("Resources", {})
        conditions = self.map.lazy_condition_map
        for logical_id in reversed(_in_dependency_order(self.old_resources)):
            resource = self.map._parsed_resources.get(logical_id)
            wanted = logical_id in kept and (
                kept[logical_id].get("Condition") is None or conditions[kept[logical_id]["Condition"]]
            )
            if wanted or not isinstance(resource, ManagedResource):
                continue
            if _is_retained(self.old_resources[logical_id]):
                del self.map._parsed_resources[logical_id]
                _event(self.stack, logical_id, resource.physical_resource_id, resource.spec.name, "DELETE_SKIPPED")
                continue
            try:
                self._destroy(logical_id, resource)
            except Exception as error:  # AWS too leaves an undeletable resource behind after an update, and says so
                _event(
                    self.stack,
                    logical_id,
                    resource.physical_resource_id,
                    resource.spec.name,
                    "DELETE_FAILED",
                    _explain(error),
                )
                self.map._parsed_resources.pop(logical_id, None)

    def _roll_back(self) -> bool:
        """Whether all was undone."""
        is_undone = True
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # a roll-back goes on to the end, and says what stayed
                is_undone = False
                _event(
                    self.stack,
                    self.stack.name,
                    self.stack.stack_id,
                    "AWS::CloudFormation::Stack",
                    "DELETE_FAILED",
                    _explain(error),
                )
        self.map._template = self.old_template
        self.map._resource_json_map = self.old_resources
        self.map.input_parameters = self.old_parameters
        if self.old_template:
            self._load(self.old_template, self.old_parameters)
        else:  # a failed creation: its template can still be read, and what couldn't be undone be deleted
            self.stack.template, self.stack.template_dict = self.text, self.template
            made = {name for name, item in self.map._parsed_resources.items() if isinstance(item, ManagedResource)}
            self.map._resource_json_map = {
                name: item for name, item in self.template.get("Resources", {}).items() if name in made
            }
        return is_undone

    def _check_exports(self) -> None:
        backend = cfn_models.cloudformation_backends[self.stack.account_id][self.stack.region_name]
        outputs = cfn_models.OutputMap(self.map, self.template, self.stack.stack_id)
        names = {export.name: export.value for export in outputs.exports}
        foreign = [
            name
            for name in names
            if name in backend.exports and backend.exports[name].exporting_stack_id != self.stack.stack_id
        ]
        if foreign:
            raise ValidationError(message=f"Export with name {foreign[0]} is already exported by another stack")
        old = {
            name: export for name, export in backend.exports.items() if export.exporting_stack_id == self.stack.stack_id
        }
        for name, export in old.items():
            user = _importer(backend, name)
            if user and names.get(name) != export.value:
                raise ValidationError(message=f"Export {name} cannot be updated or deleted as it is in use by {user}")

    def _publish(self) -> None:
        stack = self.stack
        backend = cfn_models.cloudformation_backends[stack.account_id][stack.region_name]
        stack.template = self.text
        stack.template_dict = self.template
        stack.description = self.template.get("Description")
        stack.parameters = self.parameters
        stack.output_map = stack._create_output_map()
        for name in [name for name, export in backend.exports.items() if export.exporting_stack_id == stack.stack_id]:
            del backend.exports[name]
        for export in stack.exports:
            backend.exports[export.name] = export


def _require_free_name(logical_id: str, old: ManagedResource, definition: Mapping[str, Any]) -> None:
    """CloudFormation makes the new one before the old goes. An API says itself that a name is taken; where only a
    record stands behind a type nobody would."""
    name = old.spec.name_property
    stated = definition.get("Properties", {}).get(name)
    if old.spec.recorded and stated and stated == old.properties.get(name):
        raise ValidationError(
            message="CloudFormation cannot update a stack when a custom-named resource requires replacing. Rename "
            f"{stated} and update the stack again. ({logical_id})"
        )


def _is_retained(definition: Mapping[str, Any]) -> bool:
    return str(definition.get("DeletionPolicy", "")) in ("Retain", "RetainExceptOnCreate")


def _importer(backend: CloudFormationBackend, export_name: str) -> str | None:
    for stack in list(backend.stacks.values()):
        if stack.status not in _FAILED_CREATION and any(name == export_name for name in _imports(stack)):
            return str(stack.name)
    return None


def _imports(stack: Stack) -> Iterable[str]:
    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                if key == "Fn::ImportValue":
                    yield str(_resolve(item, stack.resource_map))
                else:
                    yield from walk(item)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item)

    return walk(stack.template_dict.get("Resources", {}))


_FAILED_CREATION = ("ROLLBACK_COMPLETE", "ROLLBACK_FAILED")
"""Of such a stack nothing is left but its name: it can be deleted, and nothing else."""


def _require_changeable(stack: Stack) -> None:
    if stack.status in _FAILED_CREATION:
        raise ValidationError(message=f"Stack:{stack.stack_id} is in {stack.status} state and can not be updated.")


def _deploy(stack: Stack, verb: str, template_text: str, parameters: dict[str, Any] | None) -> None:
    """Bring `stack` to a template; its status and events tell how it went. `verb` is CREATE or UPDATE."""
    stack.status = f"{verb}_IN_PROGRESS"
    stack._add_stack_event(f"{verb}_IN_PROGRESS", resource_status_reason="User Initiated")
    try:
        _Operation(stack, template_text, parameters).run()
    except _DeploymentFailed as failure:
        rolled_back = "ROLLBACK" if verb == "CREATE" else "UPDATE_ROLLBACK"
        stack._add_stack_event(f"{rolled_back}_IN_PROGRESS", resource_status_reason=str(failure))
        # After an update what is new and can't be deleted again is left behind, and the stack is as it was.
        ended = "COMPLETE" if failure.is_undone or verb == "UPDATE" else "FAILED"
        stack._add_stack_event(f"{rolled_back}_{ended}")
        stack.status = f"{rolled_back}_{ended}"
        stack.stack_status_reason = str(failure)
        return
    stack._add_stack_event(f"{verb}_COMPLETE")
    stack.status = f"{verb}_COMPLETE"


# ---- stacks -----------------------------------------------------------------------------------------------


def _new_stack(
    backend: CloudFormationBackend,
    name: str,
    parameters: dict[str, Any],
    notification_arns: list[str] | None,
    tags: dict[str, str] | None,
    role_arn: str | None,
) -> Stack:
    stack = Stack(
        stack_id=cfn_models.generate_stack_id(name, backend.region_name, backend.account_id),
        name=name,
        template={},
        parameters=parameters,
        account_id=backend.account_id,
        region_name=backend.region_name,
        notification_arns=notification_arns,
        tags=tags,
        role_arn=role_arn,
        cross_stack_resources=backend.exports,
    )
    stack.resource_map.lazy_condition_map = parsing.LazyDict()
    backend.stacks[stack.stack_id] = stack
    return stack


def _create_stack(
    self: CloudFormationBackend,
    name: str,
    template: str,
    parameters: dict[str, Any],
    notification_arns: list[str] | None = None,
    tags: dict[str, str] | None = None,
    role_arn: str | None = None,
    enable_termination_protection: bool | None = False,
    timeout_in_mins: int | None = None,
    stack_policy_body: str | None = None,
) -> Stack:
    _require_sound(Stack.parse_template(template))
    with _deploy_lock:
        if any(stack.name == name for stack in self.stacks.values()):
            raise cfn_models.AlreadyExistsException(f"Stack [{name}] already exists")
        stack = _new_stack(self, name, parameters, notification_arns, tags, role_arn)
        stack.enable_termination_protection = str(enable_termination_protection).lower() == "true"
        stack.policy = stack_policy_body or ""
        _deploy(stack, "CREATE", template, parameters)
    return stack


def _update_stack(
    self: CloudFormationBackend,
    name: str,
    template: str,
    role_arn: str | None,
    parameters: list[dict[str, Any]],
    tags: dict[str, str] | None,
) -> Stack:
    _require_sound(Stack.parse_template(template))
    with _deploy_lock:
        stack = self.get_stack(name)
        _require_changeable(stack)
        wanted = _with_previous(stack, parameters)
        if not _is_changed(stack, Stack.parse_template(template), wanted, stack.tags if tags is None else tags):
            raise ValidationError(message="No updates are to be performed.")
        _deploy(stack, "UPDATE", template, wanted)
        if tags is not None:
            stack.tags = tags
    return stack


def _with_previous(stack: Stack, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    given = {item["ParameterKey"]: item["ParameterValue"] for item in parameters if "ParameterValue" in item}
    kept = [item["ParameterKey"] for item in parameters if str(item.get("UsePreviousValue", "")).lower() == "true"]
    previous = dict(stack.parameters or {})
    return given | {key: previous[key] for key in kept if key in previous}


def _delete_stack(self: CloudFormationBackend, name_or_stack_id: str) -> None:
    with _deploy_lock:
        stack = next((item for item in self.stacks.values() if name_or_stack_id in (item.name, item.stack_id)), None)
        if stack is None:  # AWS answers success for a stack that isn't there
            return
        if stack.enable_termination_protection:
            raise ValidationError(
                message=f"Stack [{stack.name}] cannot be deleted while TerminationProtection is enabled"
            )
        for export in stack.exports:
            user = _importer(self, export.name)
            if user and user != stack.name:
                raise ValidationError(message=f"Export {export.name} cannot be deleted as it is in use by {user}")
        _destroy_stack(self, stack)


def _destroy_stack(backend: CloudFormationBackend, stack: Stack) -> None:
    stack.status = "DELETE_IN_PROGRESS"
    stack._add_stack_event("DELETE_IN_PROGRESS", resource_status_reason="User Initiated")
    operation = _Operation(stack, json.dumps({"Resources": {}}), {})
    parsed = stack.resource_map._parsed_resources
    failures: dict[str, str] = {}
    for logical_id in reversed(_in_dependency_order(stack.resource_map._resource_json_map)):
        resource = parsed.get(logical_id)
        if not isinstance(resource, ManagedResource):
            continue
        if _is_retained(operation.old_resources[logical_id]):
            _event(stack, logical_id, resource.physical_resource_id, resource.spec.name, "DELETE_SKIPPED")
            continue
        try:
            operation._destroy(logical_id, resource)
        except Exception as error:  # the stack's status says so; the server goes on
            failures[logical_id] = _explain(error)
            _event(
                stack,
                logical_id,
                resource.physical_resource_id,
                resource.spec.name,
                "DELETE_FAILED",
                failures[logical_id],
            )
    if failures:
        reason = f"The following resource(s) failed to delete: [{', '.join(failures)}]. "
        stack.status = "DELETE_FAILED"
        stack._add_stack_event("DELETE_FAILED", resource_status_reason=reason)
        return
    for name in [name for name, export in backend.exports.items() if export.exporting_stack_id == stack.stack_id]:
        del backend.exports[name]
    stack._add_stack_event("DELETE_COMPLETE")
    stack.status = "DELETE_COMPLETE"
    del backend.stacks[stack.stack_id]
    backend.deleted_stacks[stack.stack_id] = stack


def _describe_stacks(self: CloudFormationBackend, name_or_stack_id: str | None) -> list[Stack]:
    stacks = list(self.stacks.values())  # a copy: another thread may be creating one
    if not name_or_stack_id:
        return stacks
    for stack in (*stacks, *list(self.deleted_stacks.values())):
        if stack.stack_id == name_or_stack_id or (stack.name == name_or_stack_id and stack.stack_id in self.stacks):
            return [stack]
    raise ValidationError(name_or_stack_id)


# ---- change sets ------------------------------------------------------------------------------------------


def _find_change_set(backend: CloudFormationBackend, name_or_id: str, stack_name: str | None) -> ChangeSet | None:
    """The change set of that name of the stack, or of that ARN: which must be of the stack too, where one is named.

    A caller's rights were judged on the stack that it named.
    """
    for change_set in reversed(list(backend.change_sets.values())):
        of_stack = stack_name in (change_set.stack.name, change_set.stack.stack_id)
        if change_set.change_set_id == name_or_id and (of_stack or not stack_name):
            return change_set
        if change_set.change_set_name == name_or_id and of_stack:
            return change_set
    return None


def _require_change_set(response: Any) -> ChangeSet:
    name, stack_name = response._get_param("ChangeSetName"), response._get_param("StackName")
    found = _find_change_set(response.cloudformation_backend, name, stack_name)
    if found is None:
        raise _ChangeSetNotFound(f"ChangeSet [{name}] does not exist")
    return found


def _create_change_set(
    self: CloudFormationBackend,
    stack_name: str,
    change_set_name: str,
    template: str,
    parameters: dict[str, str],
    description: str,
    change_set_type: str,
    notification_arns: list[str] | None = None,
    tags: dict[str, str] | None = None,
    role_arn: str | None = None,
) -> tuple[str, str]:
    cfn_models.validate_create_change_set(change_set_name)
    _require_sound(Stack.parse_template(template))
    with _deploy_lock:
        stack = next((item for item in self.stacks.values() if stack_name in (item.name, item.stack_id)), None)
        if change_set_type == "UPDATE" and stack is None:
            raise ValidationError(stack_name)
        if stack is not None:
            _require_fitting(stack, change_set_type)
        if stack is None:
            stack = _new_stack(self, stack_name, parameters, notification_arns, tags, role_arn)
            stack.status = "REVIEW_IN_PROGRESS"
            stack._add_stack_event("REVIEW_IN_PROGRESS", resource_status_reason="User Initiated")
        previous = _find_change_set(self, change_set_name, stack.stack_id)
        if previous is not None and previous.execution_status == "AVAILABLE":
            raise cfn_models.AlreadyExistsException(f"ChangeSet {change_set_name} already exists")
        change_set = ChangeSet(
            change_set_type=change_set_type,
            change_set_id=cfn_models.generate_changeset_id(change_set_name, self.region_name, self.account_id),
            change_set_name=change_set_name,
            stack=stack,
            template=template,
            parameters=parameters,
            description=description,
            notification_arns=notification_arns,
            tags=tags,
            role_arn=role_arn,
        )
        _judge_change_set(change_set, first=change_set_type != "UPDATE")
        self.change_sets[change_set.change_set_id] = change_set
    return change_set.change_set_id, stack.stack_id


def _require_fitting(stack: Stack, change_set_type: str) -> None:
    """A set of type CREATE is for a stack that isn't there yet, one of type UPDATE for one that is."""
    if change_set_type == "CREATE" and stack.status != "REVIEW_IN_PROGRESS":
        raise ValidationError(message=f"Stack [{stack.name}] already exists and cannot be created again")
    if change_set_type == "UPDATE" and stack.status == "REVIEW_IN_PROGRESS":
        raise ValidationError(message=f"Stack [{stack.name}] does not exist")
    _require_changeable(stack)


def _is_changed(stack: Stack, template: Any, parameters: Any, tags: Mapping[str, str] | None) -> bool:
    same_rest = dict(stack.parameters or {}) == dict(parameters or {}) and dict(tags or {}) == dict(stack.tags or {})
    return not (same_rest and stack.template_dict == template)


def _judge_change_set(change_set: ChangeSet, *, first: bool) -> None:
    """A change set that changes nothing is born FAILED, which is how the CLI learns of "no changes"."""
    if not first and not _is_changed(
        change_set.stack, change_set.template_dict, change_set.parameters, change_set.tags
    ):
        change_set.status, change_set.execution_status = "FAILED", "UNAVAILABLE"
        change_set.status_reason = (
            "The submitted information didn't contain changes. Submit different information to create a change set."
        )
    else:
        change_set.status, change_set.execution_status = "CREATE_COMPLETE", "AVAILABLE"


def _describe_change_set(self: Any) -> ActionResult:
    return ActionResult(_require_change_set(self))


def _execute_change_set_action(self: Any) -> EmptyResult:
    change_set = _require_change_set(self)
    self.cloudformation_backend.execute_change_set(change_set.change_set_id)
    return EmptyResult()


def _execute_change_set(self: CloudFormationBackend, change_set_name: str, stack_name: str | None = None) -> None:
    change_set = _find_change_set(self, change_set_name, stack_name)
    if change_set is None:
        raise _ChangeSetNotFound(f"ChangeSet [{change_set_name}] does not exist")
    with _deploy_lock:
        stack = change_set.stack
        _require_changeable(stack)
        change_set.execution_status = "EXECUTE_IN_PROGRESS"
        first = stack.status == "REVIEW_IN_PROGRESS"
        _deploy(stack, "CREATE" if first else "UPDATE", change_set.template, change_set.parameters)
        stack.tags = change_set.tags or {}
        done = stack.status in ("CREATE_COMPLETE", "UPDATE_COMPLETE")
        change_set.execution_status = "EXECUTE_COMPLETE" if done else "EXECUTE_FAILED"


def _delete_change_set(self: Any) -> EmptyResult:
    backend = self.cloudformation_backend
    found = _find_change_set(backend, self._get_param("ChangeSetName"), self._get_param("StackName"))
    if found is not None:  # AWS answers success for one that isn't there
        del backend.change_sets[found.change_set_id]
    return EmptyResult()


def _update_termination_protection(self: Any) -> ActionResult:
    stack = self.cloudformation_backend.get_stack(self._get_param("StackName"))
    stack.enable_termination_protection = self._get_bool_param("EnableTerminationProtection", False)
    return ActionResult({"StackId": stack.stack_id})


def _describe_events(self: Any) -> ActionResult:
    """DescribeEvents: the newer call by which recent CLIs read a change set's or a stack's operation events."""
    stack_name, change_set_name = self._get_param("StackName"), self._get_param("ChangeSetName")
    if not stack_name and change_set_name:
        stack_name = _require_change_set(self).stack.stack_id
    stack = self.cloudformation_backend.get_stack(stack_name)
    events = [
        {
            "EventId": str(event.event_id),
            "StackId": event.stack_id,
            "EventType": "STACK_EVENT",
            "LogicalResourceId": event.logical_resource_id,
            "PhysicalResourceId": event.physical_resource_id,
            "ResourceType": event.resource_type,
            "Timestamp": event.timestamp,
            "ResourceStatus": event.resource_status,
            "ResourceStatusReason": event.resource_status_reason,
        }
        for event in reversed(stack.events)
    ]
    return ActionResult({"OperationEvents": events})
