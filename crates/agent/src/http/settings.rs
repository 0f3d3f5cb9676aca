//! Settings of a VM: read and written as a whole, so two operators cannot overwrite each other's changes unnoticed.
//!
//! An answer has an `ETag` of the settings in force. A client that writes sends the tag that it read (`If-Match`). The loop
//! compares that tag with the stored settings, under the lock that protects the write. So a change made meanwhile, even in a file
//! or in libvirt's metadata, is not overwritten.

use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{JsonRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use homenode_api::http::{Reloaded, VmSettings};
use homenode_units::{Bytes, VmId};
use tokio::sync::oneshot;

use super::Site;
use super::problem::Failed;
use crate::handler::Wish;
use crate::setting_queue::NotSet;

/// How long to wait for the loop, which may be busy: moving pages takes a while.
const PATIENCE_LOOP: Duration = Duration::from_secs(25);

/// Handles `GET`.
pub(super) async fn get(
    State(site): State<Site>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, Failed> {
    let Path(id) = id?;
    let (vm, settings) = in_force(&site, id).await?;
    Ok(with_tag(vm, settings))
}

/// Handles `PUT`.
pub(super) async fn put(
    State(site): State<Site>,
    id: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
    body: Result<Json<VmSettings>, JsonRejection>,
) -> Result<Response, Failed> {
    let (Path(id), Json(mut wanted)) = (id?, body?);
    // Round as storing does, so the answer agrees with a later read.
    wanted.memory_floor_bytes = wanted
        .memory_floor_bytes
        .map(|floor| Bytes(floor.0.div_ceil(1024).saturating_mul(1024)));
    let tags = wanted_tags(&headers)?;
    let (vm, now) = in_force(&site, id).await?;
    if !is_one_of(&tags, &tag(vm, now)) {
        return Err(Failed::changed(&tag(vm, now)));
    }
    let is_whole = tags.split(',').any(|tag| tag.trim() == "*");
    let wish = Wish {
        vm,
        now,
        wanted,
        is_whole,
    };
    let handler = site.handler.clone();
    let settings = site.on_a_thread(move || handler.check(&wish)).await??;
    let holds = move |settings: &_| is_one_of(&tags, &tag(vm, VmSettings::of(settings)));
    match of_loop(|told| site.handler.settings.set_where(vm, settings, holds, told)).await? {
        Ok(()) => Ok(with_tag(vm, wanted)),
        Err(NotSet::Changed) => Err(Failed::changed("a different one")),
        Err(error @ (NotSet::Failed(_) | NotSet::Ended)) => Err(Failed::refused(error.to_string())),
    }
}

/// Handles `POST /-/reload`, which reloads the agent's own settings.
pub(super) async fn reload(State(site): State<Site>) -> Result<Json<Reloaded>, Failed> {
    let done = of_loop(|told| site.reload.ask(told)).await?;
    done.map(Json)
        .map_err(|why| Failed::bad_settings(format!("the previous settings stay in force: {why}")))
}

/// Sends the loop a request; returns the loop's result.
async fn of_loop<T: Send + 'static>(ask: impl FnOnce(Box<dyn FnOnce(T) + Send>)) -> Result<T, Failed> {
    let (tell, told) = oneshot::channel();
    // Fails if the client no longer waits.
    ask(Box::new(|said| drop(tell.send(said))));
    match tokio::time::timeout(PATIENCE_LOOP, told).await {
        Ok(said) => said.map_err(|_| Failed::gone()),
        Err(_) => Err(Failed::not_now(
            "the agent is busy with the host; check later whether the change was made",
        )),
    }
}

async fn in_force(site: &Site, id: String) -> Result<(VmId, VmSettings), Failed> {
    let handler = site.handler.clone();
    Ok(site.on_a_thread(move || handler.in_force(&id)).await??)
}

fn with_tag(vm: VmId, settings: VmSettings) -> Response {
    let mut response = Json(settings).into_response();
    // Cannot fail: a tag consists of letters, digits and punctuation.
    if let Ok(tag) = HeaderValue::from_str(&tag(vm, settings)) {
        response.headers_mut().insert(header::ETAG, tag);
    }
    response
}

/// Returns the tag of settings. It contains the VM and its values, so no counter is needed.
fn tag(vm: VmId, settings: VmSettings) -> String {
    let VmSettings {
        permit,
        memory_policy,
        memory_floor_bytes,
    } = settings;
    let text = |value: Option<String>| value.unwrap_or_else(|| "none".into());
    format!(
        "\"{vm}/{}/{}/{}\"",
        text(permit.map(|permit| permit.to_string())),
        text(memory_policy.map(|policy| policy.to_string())),
        text(memory_floor_bytes.map(|floor| floor.0.to_string()))
    )
}

/// Returns the tags of `If-Match`, or `*` for any settings.
fn wanted_tags(headers: &HeaderMap) -> Result<String, Failed> {
    let tags = headers.get_all(header::IF_MATCH).iter();
    let tags: Option<Vec<&str>> = tags.map(|tags| tags.to_str().ok()).collect();
    let tags = tags.map(|tags| (tags.is_empty(), tags.join(",")));
    let is_tag = |tag: &str| {
        let strong = tag.strip_prefix("W/").unwrap_or(tag);
        tag == "*" || (strong.len() >= 2 && strong.starts_with('"') && strong.ends_with('"'))
    };
    match tags {
        Some((true, _)) => Err(Failed::no_tag()),
        Some((false, tags)) if tags.split(',').map(str::trim).all(is_tag) => Ok(tags),
        _ => Err(Failed::bad_parameter(
            "the header If-Match has no valid tag: copy it from ETag, with its quotes, or send `*`",
        )),
    }
}

fn is_one_of(tags: &str, tag: &str) -> bool {
    tags.split(',').map(str::trim).any(|one| one == "*" || one == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_another_whenever_a_setting_or_the_vm_is() {
        let none = VmSettings::default();
        let with_floor = VmSettings {
            memory_floor_bytes: Some(Bytes(1)),
            ..none
        };
        let with_policy = VmSettings {
            memory_policy: Some("round-4k+carrefour".parse().unwrap()),
            ..none
        };
        let with_permit = VmSettings {
            permit: Some("250k".parse().unwrap()),
            ..none
        };
        let mut tags: Vec<String> = [none, with_floor, with_policy, with_permit]
            .map(|settings| tag(VmId(1), settings))
            .to_vec();
        tags.push(tag(VmId(2), none));
        for tag in &tags {
            // RFC 9110 requires this of an `ETag`.
            let inner = tag
                .strip_prefix('"')
                .and_then(|tag| tag.strip_suffix('"'))
                .unwrap();
            assert!(
                inner.bytes().all(|byte| matches!(byte, 0x21 | 0x23..=0x7e)),
                "{tag}"
            );
            assert!(!inner.contains(','), "{tag}");
            assert_eq!(tags.iter().filter(|other| *other == tag).count(), 1, "{tags:?}");
            assert!(is_one_of(&format!("\"other\", {tag}"), tag) && is_one_of("*", tag));
        }
        assert!(!is_one_of("", &tags[0]) && !is_one_of("W/\"x\"", &tags[0]));
    }
}
