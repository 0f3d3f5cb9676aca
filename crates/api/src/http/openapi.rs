//! The OpenAPI 3.1 description of the HTTP interface, generated from the types that are sent.

use schemars::generate::{SchemaGenerator, SchemaSettings};
use schemars::{JsonSchema, Schema};
use serde_json::{Map, Value, json};

use super::{
    DecisionRow, Decisions, DecisionsQuery, Evaluate, Evaluated, HistoryQuery, HostStatus, Links, Looked,
    Missed, Nodes, OverviewQuery, PauseFor, Pictured, Problem, Reloaded, Told, VmHistory, VmSettings,
    WhyQuery,
};
use crate::answer::{Maintenance, Recommendation, Recommendations, Reservations, Vms};
use crate::why::Answer;
use homenode_control::VmStatus;

/// Returns the whole description.
pub fn openapi() -> Value {
    let mut made = Maker::new();
    let paths = paths(&mut made);
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Homenode",
            "version": "1",
            "summary": "What an agent knows about its host, what it decides, and what it did.",
            "description": "Times are RFC 3339. A key ends in the unit of its number; unknown values are null.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": made.schemas(), "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer", "description": "The key that the agent made when it started."},
            "password": {"type": "http", "scheme": "basic", "description": "A user of web.yml."},
        }},
        "security": [{}, {"key": []}, {"password": []}],
    })
}

fn paths(made: &mut Maker) -> Value {
    let by_name = json!({
        "name": "id", "in": "path", "required": true, "description": "The VM's name or UUID.",
        "schema": {"type": "string", "minLength": 1},
    });
    let by_number = json!([{
        "name": "id", "in": "path", "required": true, "description": "Its number.",
        "schema": {"type": "integer", "format": "int64", "minimum": 0, "maximum": i64::MAX},
    }]);
    let by_node = json!([{
        "name": "id", "in": "path", "required": true, "description": "The node's number.",
        "schema": {"type": "integer", "minimum": 0, "maximum": u16::MAX},
    }]);
    let get = |what: Value| json!({ "get": what });
    json!({
        "/v1/status": get(made.operation::<HostStatus>("status", "The agent, and the host as it was last seen", &[503])),
        "/v1/vms": get(made.operation::<Vms>("vms", "Every VM", &[503])),
        "/v1/vms/{id}": get(with(made.operation::<VmStatus>("vm", "One VM", &[404, 409, 503]), "parameters", json!([by_name.clone()]))),
        "/v1/vms/{id}/why": get(made.about::<WhyQuery, Answer>(
            &by_name, "why", "Why a VM was slow: what changed, by how much, and who changed it", &[400, 404, 409, 503]
        )),
        "/v1/overview": get(made.query::<OverviewQuery, Pictured>(
            "overview", "Nodes, links, VMs and recent events, now or at a time in the past", &[400, 404, 503]
        )),
        "/v1/vms/{id}/settings": settings(made, &by_name),
        "/v1/nodes": get(made.operation::<Nodes>("nodes", "Every node", &[503])),
        "/v1/links": get(made.operation::<Links>("links", "Traffic between nodes, if it is counted", &[503])),
        "/v1/decisions": get(made.query::<DecisionsQuery, Decisions>(
            "decisions", "Decisions and their outcomes, the newest first", &[400, 404, 503]
        )),
        "/v1/decisions/{id}": get(with(made.operation::<DecisionRow>(
            "decision", "One decision, by its number in the history", &[400, 404, 503]
        ), "parameters", by_number.clone())),
        "/v1/history": get(made.query::<HistoryQuery, VmHistory>("history", "What a VM did", &[400, 404, 409, 503])),
        "/v1/placements/evaluate": {"post": made.posted::<Evaluate, Evaluated>(
            "evaluate", "Whether and where a VM would fit; nothing is reserved", &[400, 413, 415, 422, 503]
        )},
        "/v1/recommendations": get(made.operation::<Recommendations>(
            "recommendations", "Changes that policies recommend, and their outcomes", &[503]
        )),
        "/v1/recommendations/{id}/apply": {"post": with(made.operation::<Recommendation>(
            "apply", "Approve a recommendation: it is carried out from the next cycle on", &[400, 404, 409, 503]
        ), "parameters", by_number.clone())},
        "/v1/recommendations/{id}/reject": {"post": with(made.operation::<Recommendation>(
            "reject", "Reject a recommendation: it is not made again soon", &[400, 404, 409, 503]
        ), "parameters", by_number.clone())},
        "/v1/reservations": get(made.operation::<Reservations>(
            "reservations", "Nodes that are reserved for VMs that do not run yet", &[503]
        )),
        "/v1/reservations/{id}": {"delete": with(made.done("drop", "Cancel a reservation", &[400, 404, 503]), "parameters", by_number)},
        "/v1/maintenance": get(made.operation::<Maintenance>(
            "maintenance", "Nodes that are drained, what is left on them, and whether the agent is paused", &[503]
        )),
        "/v1/maintenance/drains/{id}": {
            "put": made.operation::<Maintenance>(
                "drain", "Drain a node: move its VMs away, and keep it empty", &[400, 404, 409, 503]
            ),
            "delete": made.operation::<Maintenance>("endDrain", "End draining a node: VMs may use it again", &[400, 404, 409, 503]),
            "parameters": by_node,
        },
        "/v1/maintenance/pause": {
            "put": made.posted::<PauseFor, Maintenance>(
                "pause", "Pause the agent: it changes nothing for a while", &[400, 413, 415, 422, 503]
            ),
            "delete": made.operation::<Maintenance>("endPause", "End a pause", &[503]),
        },
        "/-/reload": {"post": made.operation::<Reloaded>(
            "reload", "Reload the agent's settings; if they are invalid, the old ones stay in force", &[409, 503]
        )},
        "/v1/events": get(events(made)),
        "/v1/openapi.json": get(json!({
            "operationId": "openapi",
            "summary": "This description",
            "responses": {"200": {
                "description": "OpenAPI 3.1", "content": {"application/json": {"schema": {"type": "object"}}}
            }},
        })),
    })
}

/// Describes a VM's settings, and how an operator sets them.
fn settings(made: &mut Maker, by_name: &Value) -> Value {
    let tag = json!({"ETag": {
        "description": "The value of `If-Match` that changes only this version.", "schema": {"type": "string"},
    }});
    let mut get = made.operation::<VmSettings>(
        "settings",
        "The operator's settings of a VM",
        &[400, 404, 409, 422, 503],
    );
    get["parameters"] = json!([by_name]);
    let mut put = made.posted::<VmSettings, VmSettings>(
        "set",
        "Set all of the operator's settings of a VM; answered once they are in force",
        &[400, 404, 409, 412, 413, 415, 422, 428, 503],
    );
    put["parameters"] = json!([by_name, {
        "name": "If-Match", "in": "header", "required": true,
        "description": "The `ETag` of what was read, so that no other client's change is lost, or `*`.",
        "schema": {"type": "string", "pattern": "^(\\*|\"[!#-+\\--~]+\")$"},
    }]);
    put["security"] = json!([{"key": []}, {"password": []}]);
    get["responses"]["200"]["headers"] = tag.clone();
    put["responses"]["200"]["headers"] = tag;
    json!({"get": get, "put": put})
}

/// Describes the event stream. OpenAPI can describe a stream only in words.
fn events(made: &mut Maker) -> Value {
    let carried = json!({"oneOf": [made.schema::<Told>(), made.schema::<Looked>(), made.schema::<Missed>()]});
    json!({
        "operationId": "events",
        "summary": "Events as they happen",
        "description": "Server-sent events. `event` is `cycle` at the end of a cycle, `gap` if events are missing, \
            otherwise what happened: `decided`, `found`, `appeared` and so on. `data` is JSON.",
        "parameters": [{
            "name": "Last-Event-ID", "in": "header", "required": false,
            "description": "The id of the last event received: the stream continues after it.",
            "schema": {"type": "string"},
        }],
        "responses": {
            "200": {"description": "Continues until it is closed", "content": {"text/event-stream": {
                "schema": {"type": "string", "contentMediaType": "application/json", "contentSchema": carried}
            }}},
        },
    })
}

fn with(mut object: Value, key: &str, value: Value) -> Value {
    object[key] = value;
    object
}

/// Builds operations, and collects the schemas that they use.
struct Maker(SchemaGenerator);

impl Maker {
    fn new() -> Maker {
        let settings = SchemaSettings::draft2020_12().for_serialize();
        let settings = settings.with(|s| s.definitions_path = "/components/schemas".into());
        Maker(settings.into_generator())
    }

    fn schema<T: JsonSchema>(&mut self) -> Schema {
        self.0.subschema_for::<T>()
    }

    fn schemas(&mut self) -> Map<String, Value> {
        self.0.take_definitions(true)
    }

    /// Builds an operation that answers with `T`, or with a problem and one of these statuses.
    fn operation<T: JsonSchema>(&mut self, id: &str, summary: &str, problems: &[u16]) -> Value {
        let answer = self.schema::<T>();
        let mut responses = json!({
            "200": {"description": summary, "content": {"application/json": {"schema": answer}}}
        });
        for status in problems.iter().chain(&[401, 403]) {
            let problem = self.schema::<Problem>();
            responses[status.to_string()] = json!({
                "description": what_is_wrong(*status),
                "content": {"application/problem+json": {"schema": problem}},
            });
        }
        json!({"operationId": id, "summary": summary, "responses": responses})
    }

    /// Builds an operation that answers without a body, or with a problem and one of these statuses.
    fn done(&mut self, id: &str, summary: &str, problems: &[u16]) -> Value {
        let mut operation = self.operation::<()>(id, summary, problems);
        let responses = operation["responses"].as_object_mut();
        if let Some(responses) = responses {
            responses.remove("200");
            responses.insert("204".into(), json!({"description": summary}));
        }
        operation
    }

    fn query<Q: JsonSchema, T: JsonSchema>(&mut self, id: &str, summary: &str, problems: &[u16]) -> Value {
        let query = asked::<Q>();
        let required = query["required"].as_array().cloned().unwrap_or_default();
        let fields = query["properties"].as_object().cloned().unwrap_or_default();
        let parameters = fields.into_iter().map(|(name, schema)| {
            let mut schema = if_there(schema);
            let about = schema.as_object_mut().and_then(|fields| fields.remove("description"));
            json!({
                "name": name, "in": "query", "required": required.contains(&json!(name)), "description": about,
                "schema": schema,
            })
        });
        let parameters = parameters.collect();
        with(
            self.operation::<T>(id, summary, problems),
            "parameters",
            parameters,
        )
    }

    /// Builds an operation on one VM.
    fn about<Q: JsonSchema, T: JsonSchema>(
        &mut self,
        which: &Value,
        id: &str,
        summary: &str,
        problems: &[u16],
    ) -> Value {
        let mut operation = self.query::<Q, T>(id, summary, problems);
        let parameters = operation["parameters"].as_array_mut();
        parameters
            .into_iter()
            .for_each(|all| all.insert(0, which.clone()));
        operation
    }

    fn posted<B: JsonSchema, T: JsonSchema>(&mut self, id: &str, summary: &str, problems: &[u16]) -> Value {
        let body = json!({"required": true, "content": {"application/json": {"schema": asked::<B>()}}});
        with(self.operation::<T>(id, summary, problems), "requestBody", body)
    }
}

/// Returns the schema of a request, without references.
fn asked<T: JsonSchema>() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    settings.into_generator().into_root_schema_for::<T>().to_value()
}

/// Removes `null` from an optional parameter's types.
fn if_there(mut schema: Value) -> Value {
    if let Some(kinds) = schema["type"].as_array() {
        let kind = kinds.iter().find(|kind| **kind != "null").cloned();
        schema["type"] = json!(kind);
    }
    let without_null = schema["anyOf"]
        .as_array()
        .and_then(|all| all.iter().find(|one| one["type"] != "null"));
    if let Some(Value::Object(one)) = without_null.cloned()
        && let Some(fields) = schema.as_object_mut()
    {
        fields.remove("anyOf");
        fields.extend(one);
    }
    schema
}

fn what_is_wrong(status: u16) -> &'static str {
    match status {
        400 => "A parameter, or the body, is wrong",
        401 => "The client is not authenticated; `WWW-Authenticate` says how to authenticate",
        403 => "The client may not do that, or not from its address",
        404 => "There is no such thing",
        409 => {
            "The request conflicts with the current state, several VMs have that name, or the settings file is invalid"
        }
        412 => "Another client has changed the settings since they were read",
        413 => "The body is too long",
        415 => "The body is not declared as JSON",
        422 => "The body does not have the form that is expected, or the agent cannot do that",
        428 => "The header `If-Match` is missing",
        _ => "Not now: the agent has not looked at the host yet, or there are too many requests",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To write the description again, run `HOMENODE_WRITE_SCHEMAS=1 cargo test -p homenode-api openapi`; then review the diff.
    #[test]
    fn the_description_is_as_committed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/schema/openapi.json");
        let text = format!("{:#}\n", openapi());
        if std::env::var_os("HOMENODE_WRITE_SCHEMAS").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == text,
            "the HTTP interface is another than the committed one"
        );
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
            match value {
                Value::Object(fields) => {
                    found.extend(fields.get("$ref").and_then(Value::as_str));
                    fields.values().for_each(|value| references(value, found));
                }
                Value::Array(values) => values.iter().for_each(|value| references(value, found)),
                _ => {}
            }
        }
        let (whole, mut found) = (openapi(), Vec::new());
        references(&whole, &mut found);
        assert!(found.len() > 20);
        for reference in found {
            let path = reference.strip_prefix('#').expect("inside the document");
            assert!(whole.pointer(path).is_some(), "{reference}");
        }
    }
}
