//! Error responses, in the format of RFC 9457.

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection, QueryRejection};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use homenode_api::ApiError;
use homenode_api::http::Problem;
use homenode_recorder::RecordError;

/// A problem on its way to the client.
#[derive(Clone, Debug)]
pub(super) struct Failed {
    status: StatusCode,
    kind: &'static str,
    title: &'static str,
    detail: String,
    /// The `WWW-Authenticate` header, if authenticating would help.
    challenge: Option<&'static str>,
}

impl Failed {
    fn new(status: StatusCode, kind: &'static str, title: &'static str, detail: impl Into<String>) -> Failed {
        Failed {
            status,
            kind,
            title,
            detail: detail.into(),
            challenge: None,
        }
    }

    /// A parameter is wrong.
    pub(super) fn bad_parameter(detail: impl Into<String>) -> Failed {
        Failed::new(
            StatusCode::BAD_REQUEST,
            "bad-parameter",
            "A parameter is wrong",
            detail,
        )
    }

    /// The request came from a host or page that may not send it.
    pub(super) fn forbidden(detail: impl Into<String>) -> Failed {
        Failed::new(
            StatusCode::FORBIDDEN,
            "forbidden",
            "Host or page not allowed",
            detail,
        )
    }

    /// The client is not authenticated; `challenge` says how to authenticate.
    pub(super) fn unauthorized(detail: impl Into<String>, challenge: &'static str) -> Failed {
        let status = StatusCode::UNAUTHORIZED;
        Failed {
            challenge: Some(challenge),
            ..Failed::new(status, "unauthorized", "The client is not authenticated", detail)
        }
    }

    /// Too many passwords wait to be checked.
    pub(super) fn too_many() -> Failed {
        let status = StatusCode::TOO_MANY_REQUESTS;
        let detail = "too many passwords are waiting to be checked: try again in a moment";
        Failed::new(status, "too-many", "Too many at once", detail)
    }

    /// The client is authenticated, but lacks the role.
    pub(super) fn may_not(detail: impl Into<String>) -> Failed {
        Failed::new(StatusCode::FORBIDDEN, "may-not", "Not permitted", detail)
    }

    /// The settings changed since the client read them; `tag` is the current tag.
    pub(super) fn changed(tag: &str) -> Failed {
        let detail = format!(
            "another client changed the settings: read them again (their tag is now {tag}), and send the new tag"
        );
        Failed::new(
            StatusCode::PRECONDITION_FAILED,
            "changed",
            "The settings have changed since they were read",
            detail,
        )
    }

    /// The client did not say which version of the settings it read.
    pub(super) fn no_tag() -> Failed {
        let detail =
            "send `If-Match:` with the ETag of the settings read, or `If-Match: *` to overwrite any settings";
        Failed::new(
            StatusCode::PRECONDITION_REQUIRED,
            "no-tag",
            "The header If-Match is missing",
            detail,
        )
    }

    /// The agent cannot do or answer this.
    pub(super) fn refused(detail: impl Into<String>) -> Failed {
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        Failed::new(status, "refused", "The agent cannot do or answer that", detail)
    }

    /// The request is valid, but the settings to reload are invalid, or this run has no settings file.
    pub(super) fn bad_settings(detail: impl Into<String>) -> Failed {
        let title = "The settings cannot be reloaded";
        Failed::new(StatusCode::CONFLICT, "bad-settings", title, detail)
    }

    pub(super) fn no_such_decision(id: i64) -> Failed {
        let detail = format!("the history has no decision {id}: /v1/decisions lists those that it has");
        Failed::new(
            StatusCode::NOT_FOUND,
            "no-such-decision",
            "There is no such decision",
            detail,
        )
    }

    /// The body's content type is not JSON.
    pub(super) fn not_json() -> Failed {
        let detail = "send JSON, with `Content-Type: application/json`";
        Failed::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "bad-body",
            "The body is wrong",
            detail,
        )
    }

    pub(super) fn no_such_vm(name: &str, running: impl Iterator<Item = String>) -> Failed {
        let running: Vec<String> = running.take(32).collect();
        let detail = format!("no VM `{name}` runs here; there are: {}", running.join(", "));
        Failed::new(StatusCode::NOT_FOUND, "no-such-vm", "There is no such VM", detail)
    }

    pub(super) fn no_such_path() -> Failed {
        let detail =
            "/v1/openapi.json lists the paths of the API; others are /metrics, /-/healthy and /-/ready";
        Failed::new(
            StatusCode::NOT_FOUND,
            "no-such-path",
            "There is nothing here",
            detail,
        )
    }

    pub(super) fn no_history() -> Failed {
        let detail =
            "this agent keeps no history: start it with `--history FILE`, and with `record.days` above 0";
        Failed::new(StatusCode::NOT_FOUND, "no-history", "There is no history", detail)
    }

    /// The history does not include that time, or has too little about it.
    pub(super) fn nothing_known(detail: impl Into<String>) -> Failed {
        Failed::new(
            StatusCode::NOT_FOUND,
            "nothing-known",
            "Too little was recorded",
            detail,
        )
    }

    pub(super) fn wrong_method() -> Failed {
        let detail = "the header Allow lists the methods of this path";
        Failed::new(
            StatusCode::METHOD_NOT_ALLOWED,
            "wrong-method",
            "The path does not have this method",
            detail,
        )
    }

    /// Too early, or too many requests at once: the client should retry.
    pub(super) fn not_now(detail: impl Into<String>) -> Failed {
        Failed::new(StatusCode::SERVICE_UNAVAILABLE, "not-now", "Not now", detail)
    }

    fn broken(detail: impl Into<String>) -> Failed {
        let (status, title) = (StatusCode::INTERNAL_SERVER_ERROR, "Something is broken");
        Failed::new(status, "broken", title, detail)
    }

    /// The thread that worked on the answer has ended.
    pub(super) fn gone() -> Failed {
        Failed::broken("the work was cut short; the agent's log may say why")
    }
}

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        let problem = Problem {
            kind: format!("urn:homenode:problem:{}", self.kind),
            title: self.title.to_owned(),
            status: self.status.as_u16(),
            detail: self.detail,
        };
        let mut response = (self.status, Json(problem)).into_response();
        let headers = response.headers_mut();
        let kind = HeaderValue::from_static("application/problem+json");
        headers.insert(header::CONTENT_TYPE, kind);
        if let Some(challenge) = self.challenge {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        }
        if matches!(
            self.status,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS
        ) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

impl From<ApiError> for Failed {
    fn from(error: ApiError) -> Failed {
        let detail = error.to_string();
        match error {
            ApiError::NoSuchVm { vm, running } => Failed::no_such_vm(&vm, running.into_iter()),
            ApiError::AmbiguousVm { .. } => {
                let title = "Several VMs have this name";
                Failed::new(StatusCode::CONFLICT, "ambiguous-vm", title, detail)
            }
            ApiError::NoSuchId { .. } => {
                let title = "Nothing has this number";
                Failed::new(StatusCode::NOT_FOUND, "no-such-id", title, detail)
            }
            ApiError::Conflict { .. } => Failed::new(
                StatusCode::CONFLICT,
                "conflict",
                "The request conflicts with the current state",
                detail,
            ),
            ApiError::NotYet { .. } => Failed::not_now(detail),
            ApiError::MayNot { .. } => Failed::may_not(detail),
            ApiError::BadInput { .. } | ApiError::Malformed { .. } | ApiError::Refused { .. } => {
                Failed::refused(detail)
            }
        }
    }
}

impl From<RecordError> for Failed {
    fn from(error: RecordError) -> Failed {
        match error {
            RecordError::Missing { .. } => Failed::no_history(),
            error => Failed::broken(error.to_string()),
        }
    }
}

impl From<QueryRejection> for Failed {
    fn from(rejection: QueryRejection) -> Failed {
        Failed::bad_parameter(rejection.body_text())
    }
}

impl From<PathRejection> for Failed {
    fn from(rejection: PathRejection) -> Failed {
        Failed::bad_parameter(rejection.body_text())
    }
}

impl From<JsonRejection> for Failed {
    fn from(rejection: JsonRejection) -> Failed {
        let (kind, title) = ("bad-body", "The body is wrong");
        Failed::new(rejection.status(), kind, title, rejection.body_text())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_has_every_kind_with_its_status() {
        let document = include_str!("../../../../docs/API.md");
        let of_api = [
            ApiError::NoSuchId {
                what: "reservation".into(),
                id: 1,
                known: vec![],
            },
            ApiError::Conflict { why: "over".into() },
            ApiError::AmbiguousVm {
                vm: "web".into(),
                ids: vec![],
            },
        ];
        let all = [
            Failed::bad_parameter(""),
            Failed::forbidden(""),
            Failed::unauthorized("", ""),
            Failed::too_many(),
            Failed::may_not(""),
            Failed::changed(""),
            Failed::no_tag(),
            Failed::refused(""),
            Failed::no_such_decision(1),
            Failed::not_json(),
            Failed::no_such_vm("", std::iter::empty()),
            Failed::no_such_path(),
            Failed::no_history(),
            Failed::nothing_known(""),
            Failed::wrong_method(),
            Failed::not_now(""),
            Failed::broken(""),
        ];
        for Failed { kind, status, .. } in all.into_iter().chain(of_api.map(Failed::from)) {
            let (name, status) = (format!("`{kind}`"), status.as_u16().to_string());
            let is_its =
                |line: &&str| line.starts_with('|') && line.contains(&name) && line.contains(&status);
            assert!(
                document.lines().any(|line| is_its(&line)),
                "docs/API.md lacks {kind}, {status}"
            );
        }
    }
}
