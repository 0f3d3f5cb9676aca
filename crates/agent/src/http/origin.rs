//! Decides which requests are accepted over TCP: those of programs on this host, and of this agent's own page.
//!
//! A foreign page in a browser on this host can send requests here, too. `Origin` then names that page; or, if the page's own
//! host name resolves to this address (DNS rebinding), `Host` holds that name. Over TLS, the browser checks that the certificate
//! contains the name before it sends anything.

use std::net::{IpAddr, SocketAddr};

use axum::http::request::Parts;
use axum::http::{HeaderMap, uri::Authority};

use super::problem::Failed;

/// Refuses requests of other pages.
///
/// # Errors
/// If the request is refused: says what is wrong, and what to write instead.
pub(super) fn check(head: &Parts, bound: SocketAddr, is_tls: bool) -> Result<(), Failed> {
    let host = one(&head.headers, "host")?;
    // An authority in the request line takes precedence.
    let host = head.uri.authority().map(Authority::as_str).or(host);
    let host = host.ok_or_else(|| Failed::bad_parameter("the header Host is missing"))?;
    let scheme = if is_tls { "https" } else { "http" };
    if !is_tls && !is_ours(host, bound.ip()) {
        let detail = format!("`{host}` is not a name of this agent: use {bound} or localhost");
        return Err(Failed::forbidden(detail));
    }
    match one(&head.headers, "origin")? {
        Some(origin) if origin.split_once("://") != Some((scheme, host)) => {
            let detail = format!("a page of `{origin}` may not send requests to {scheme}://{host}");
            Err(Failed::forbidden(detail))
        }
        _ => Ok(()),
    }
}

/// Returns the only value of a header. A value that is not text, or a second one, is an error.
fn one<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Failed> {
    let mut all = headers.get_all(name).iter();
    let (first, second) = (all.next(), all.next());
    let wrong = || Failed::bad_parameter(format!("the header {name} is not text, or was sent twice"));
    if second.is_some() {
        return Err(wrong());
    }
    first.map(|value| value.to_str().map_err(|_| wrong())).transpose()
}

/// Returns true if `host`, with or without a port, is loopback or the bound address. The port may differ, since a tunnel may use
/// another.
fn is_ours(host: &str, bound: IpAddr) -> bool {
    let Ok(authority) = host.parse::<Authority>() else {
        return false;
    };
    if authority.as_str().contains('@') {
        return false;
    }
    let name = authority.host();
    let address = name
        .trim_start_matches('[')
        .trim_end_matches(']')
        .parse::<IpAddr>();
    name.eq_ignore_ascii_case("localhost") || address.is_ok_and(|ip| ip.is_loopback() || ip == bound)
}

#[cfg(test)]
mod tests {
    use axum::http::Request;
    use axum::response::IntoResponse as _;

    use super::*;

    fn status(line: &str, headers: &[(&str, &str)]) -> u16 {
        let mut request = Request::builder().uri(line);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (head, ()) = request.body(()).unwrap().into_parts();
        let checked = check(&head, "127.0.0.1:9464".parse().unwrap(), false);
        checked.map_or_else(|failed| failed.into_response().status().as_u16(), |()| 200)
    }

    #[test]
    fn only_our_own_names_are_answered() {
        for good in [
            "localhost",
            "localhost:80",
            "LOCALHOST:9464",
            "127.0.0.1:9464",
            "127.9.9.9",
            "[::1]:1",
        ] {
            assert_eq!(status("/", &[("host", good)]), 200, "{good}");
        }
        for bad in [
            "evil.example:9464",
            "127.0.0.1.evil.example",
            "192.0.2.1",
            "a@localhost",
            "localhost.",
            "",
        ] {
            assert_eq!(status("/", &[("host", bad)]), 403, "{bad}");
        }
        assert_eq!(status("/", &[]), 400);
        assert_eq!(
            status("/", &[("host", "localhost"), ("host", "evil.example")]),
            400
        );
        assert_eq!(status("http://evil.example/", &[("host", "localhost")]), 403);
    }

    #[test]
    fn only_our_own_pages_are_answered() {
        let from = |origin| status("/", &[("host", "localhost:9464"), ("origin", origin)]);
        assert_eq!(from("http://localhost:9464"), 200);
        for bad in [
            "null",
            "http://localhost",
            "https://localhost:9464",
            "http://evil.example",
            "http://127.0.0.1:9464",
            "",
        ] {
            assert_eq!(from(bad), 403, "{bad}");
        }
    }
}
