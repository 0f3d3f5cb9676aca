//! Fuzzes HTTP requests, as bytes, with the agent's own routes and checks. Every request is answered, with a problem document if
//! it is refused. Only an operator's request changes anything.
//!
//! `KEY` in the header Authorization stands for this run's key. The header X-Came gives the role of a client on the socket,
//! `viewer` or `operator`; without it, the request came over loopback.

#![no_main]

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr};

use axum::body::Body;
use axum::http::{HeaderValue, Method, Request, header};
use homenode_agent::http::Came;
use homenode_agent::role::Role;
use homenode_fuzz::site::Served;
use libfuzzer_sys::fuzz_target;

/// Maximum number of headers; more than any input needs.
const HEADERS_MAX: usize = 32;

thread_local! {
    static SERVED: RefCell<Option<Served>> = const { RefCell::new(None) };
}

/// Parses bytes into a request, as a server does.
fn parsed(bytes: &[u8], key: &str) -> Option<Request<Body>> {
    let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
    let mut head = httparse::Request::new(&mut headers);
    let httparse::Status::Complete(end) = head.parse(bytes).ok()? else {
        return None;
    };
    let mut request = Request::builder().method(head.method?).uri(head.path?);
    for header in head.headers.iter() {
        let value = match header.name.eq_ignore_ascii_case("authorization") {
            true => String::from_utf8_lossy(header.value)
                .replacen("KEY", key, 1)
                .into_bytes(),
            false => header.value.to_owned(),
        };
        request = request.header(header.name, HeaderValue::from_bytes(&value).ok()?);
    }
    request.body(Body::from(bytes[end..].to_owned())).ok()
}

fn came(request: &Request<Body>) -> Came {
    match request.headers().get("x-came").map(HeaderValue::as_bytes) {
        Some(b"viewer") => Came::Socket(Role::Viewer),
        Some(b"operator") => Came::Socket(Role::Operator),
        _ => Came::Tcp(IpAddr::V4(Ipv4Addr::LOCALHOST)),
    }
}

/// Returns true if the request comes from an operator.
fn may_change(came: Came, request: &Request<Body>, key: &str) -> bool {
    let said = request.headers().get(header::AUTHORIZATION);
    match came {
        Came::Socket(role) => role == Role::Operator,
        Came::Tcp(_) => said.is_some_and(|said| said.as_bytes().ends_with(key.as_bytes())),
    }
}

fuzz_target!(|bytes: &[u8]| {
    SERVED.with_borrow_mut(|kept| {
        let served =
            kept.get_or_insert_with(|| Served::new(None, None).expect("without a file nothing is wrong"));
        let key = served.key();
        let Some(request) = parsed(bytes, &key) else {
            return;
        };
        let came = came(&request);
        let is_operator = may_change(came, &request, &key);
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let before = served.state();
        let answered = served.answer(came, request);
        answered.is_one(method != Method::HEAD, path.starts_with("/-/"));
        let is_changed = served.state() != before;
        assert!(
            !is_changed || is_operator && answered.status.is_success() && method != Method::GET,
            "{method} {path} changed something: {answered:?}"
        );
        if is_changed {
            // The next input must not see this one's changes.
            *kept = None;
        }
    });
});
