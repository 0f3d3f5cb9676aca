//! Fuzzes `web.yml`, the file of TLS and passwords, and a client's header Authorization. The first line of the input is the
//! header's value. The rest is a tree of files with `web.yml`, with a line `=== path` before each file.
//!
//! A file is either accepted, or refused with a message of limited length. If the passwords are known, a client without a right
//! one is refused.

#![no_main]

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr};

use axum::body::Body;
use axum::http::{HeaderValue, Request, StatusCode, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use homenode_agent::http::{Came, check};
use homenode_control::http::Config;
use homenode_fuzz::Tree;
use homenode_fuzz::site::Served;
use libfuzzer_sys::fuzz_target;

/// A web configuration with the bcrypt hash of `correct horse`, at the lowest cost.
const KNOWN: &str =
    "basic_auth_users:\n  web: $2b$04$K08QjgoDisLXmecYm6C23Ol5IpNA4Oymq6Olsi34gjEulRPJlE/5G\n";

thread_local! {
    static SERVED: RefCell<Option<Served>> = const { RefCell::new(None) };
}

fn is_right(said: &[u8]) -> bool {
    let said = said.get("Basic ".len()..).unwrap_or_default();
    BASE64_STANDARD
        .decode(said.trim_ascii())
        .is_ok_and(|said| said == b"web:correct horse")
}

/// Sends a request with this header.
fn ask(said: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(said) else {
        return;
    };
    SERVED.with_borrow_mut(|kept| {
        let served = kept.get_or_insert_with(|| Served::new(Some(KNOWN), None).expect("a good file"));
        let request = Request::builder()
            .uri("/-/ready")
            .header(header::HOST, "localhost");
        let request = request.header(header::AUTHORIZATION, value).body(Body::empty());
        let came = Came::Tcp(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let answered = served.answer(came, request.expect("a request"));
        answered.is_one(true, true);
        assert_eq!(
            answered.status != StatusCode::UNAUTHORIZED,
            is_right(said),
            "{answered:?}"
        );
    });
}

fuzz_target!(|bytes: &[u8]| {
    let end = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .unwrap_or(bytes.len());
    let (said, rest) = bytes.split_at(end);
    ask(said);
    let Ok(text) = std::str::from_utf8(rest) else {
        return;
    };
    let tree = Tree::unpack(text);
    let config = Config {
        group: String::new(),
        web_config: tree.root().join("web.yml").display().to_string(),
    };
    let at = |address: &str| check(Some(address.parse().expect("an address")), &config);
    let (near, far) = (at("127.0.0.1:0"), at("192.0.2.1:0"));
    for refused in [&near, &far]
        .into_iter()
        .filter_map(|checked| checked.as_ref().err())
        .map(|error| format!("{error:#}"))
    {
        assert!(
            !refused.is_empty() && refused.len() < 4 * bytes.len() + 1000,
            "{refused}"
        );
    }
    // A configuration that is good enough for a public address is good enough for loopback.
    assert!(far.is_err() || near.is_ok(), "{text}");
});
