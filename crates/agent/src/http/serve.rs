//! The HTTP listeners: on TCP if requested, and on a socket in the state directory.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::body::Body;
use axum::response::Response;
use futures_util::future::OptionFuture;
use homenode_api::http::Listen;
use homenode_api::remedy;
use homenode_control::http::Config;
use homenode_kernel::files::Part;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;

use super::access::{Access, Came};
use super::web::Web;
use super::{Site, THREADS, router};
use crate::feed::Feed;
use crate::role::Readers;
use crate::server::listen;

/// The socket's name in the state directory.
const SOCKET: &str = "http.sock";
/// How long a client may take to send a request's head, or be silent between two requests.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most bytes of a request's head.
const HEAD_MAX: usize = 32 << 10;
/// Most connections at one time, for TCP and the socket each; beyond that, the oldest is dropped. The limit is lower if the
/// process may open fewer than 16 times as many files.
const CONNECTIONS_MAX: usize = 256;
/// Number of blocking threads for password checks, in addition to those for other requests.
const PASSWORDS: usize = 1;
/// How long a TLS handshake may take. Meanwhile it counts as a connection.
const PATIENCE_TLS: Duration = Duration::from_secs(10);
/// How long to wait before accepting again after the process ran out of file descriptors.
const KNOCK_AGAIN: Duration = Duration::from_millis(50);
/// How long pending answers may take once the agent ends.
const END: Duration = Duration::from_secs(1);

/// The open server. Dropping it ends all connections.
#[derive(Debug)]
pub struct HttpServer {
    path: Option<PathBuf>,
    url: Option<String>,
    /// Stops the server when dropped.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    feed: Feed,
}

impl HttpServer {
    /// Opens the server if a TCP address or a state directory is given.
    ///
    /// # Errors
    /// If the address cannot be used, or the state directory cannot hold the socket.
    pub fn open_where_asked(
        listen_at: Option<Listen>,
        state: Option<&Path>,
        config: (&Config, Readers),
        site: Site,
    ) -> anyhow::Result<Option<HttpServer>> {
        let is_asked = state.is_some() || listen_at.is_some();
        is_asked
            .then(|| HttpServer::open(listen_at, state, config, site))
            .transpose()
    }

    /// Opens the server: on TCP if an address is given, and on a socket if there is a state directory.
    ///
    /// # Errors
    /// If the address is taken or may not be listened on, or the state directory cannot hold the socket.
    pub fn open(
        listen_at: Option<Listen>,
        state: Option<&Path>,
        (config, readers): (&Config, Readers),
        site: Site,
    ) -> anyhow::Result<HttpServer> {
        check(listen_at, config).map_err(anyhow::Error::msg)?;
        let tcp = listen_at.map(tcp_listener).transpose()?;
        let bound = tcp.as_ref().map(TcpListener::local_addr).transpose()?;
        let path = state.map(|state| state.join(SOCKET));
        let unix = match (state, &path) {
            (Some(state), Some(path)) => Some(listen(state, path, readers)?),
            _ => None,
        };
        let feed = site.feed.clone();
        let answers = Answers::new(bound, state, config, site)?;
        let url = answers.access.url();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(THREADS + PASSWORDS)
            .thread_name("http-work")
            .build()
            .context("cannot start the runtime that answers HTTP")?;
        let (stop, stopped) = oneshot::channel();
        let serving = async move {
            let mut doors = Doors::new(answers, readers);
            let tcp = tcp.and_then(|tcp| tokio::net::TcpListener::from_std(tcp).ok());
            let unix = unix.and_then(|unix| tokio::net::UnixListener::from_std(unix).ok());
            tokio::select! {
                _ = stopped => {}
                () = doors.take_in(tcp.as_ref(), unix.as_ref()) => {}
            }
        };
        let named = std::thread::Builder::new().name("http".into());
        let thread = named.spawn(move || {
            runtime.block_on(serving);
            runtime.shutdown_timeout(END);
        });
        Ok(HttpServer {
            path,
            url,
            stop: Some(stop),
            thread: Some(thread.context("cannot start the thread that answers HTTP")?),
            feed,
        })
    }

    /// Returns the page's URL, with the real port and the key that makes the browser an operator.
    pub fn url(&self) -> Option<String> {
        self.url.clone()
    }

    /// Returns the feed, where the loop publishes.
    pub fn feed(&self) -> &Feed {
        &self.feed
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Checks that the agent may listen at an address. Call this before anything is started.
///
/// # Errors
/// If it may not: says what is wrong, with the remedy.
pub fn check(listen_at: Option<Listen>, config: &Config) -> anyhow::Result<()> {
    let Some(at) = listen_at else { return Ok(()) };
    let web = web_config(config).map(Web::read).transpose()?;
    web.unwrap_or_default().may_listen(at.address())
}

/// Returns the path of `web.yml`, if one is set.
fn web_config(config: &Config) -> Option<&Path> {
    Some(Path::new(&config.web_config)).filter(|path| !path.as_os_str().is_empty())
}

fn tcp_listener(at: Listen) -> anyhow::Result<TcpListener> {
    let address = at.address();
    let listener = TcpListener::bind(address);
    let listener = listener.map_err(|e| {
        let remedy = match e.kind() {
            std::io::ErrorKind::AddrInUse => "; another program has this port: choose another with --listen",
            _ => remedy(&e),
        };
        anyhow::Error::new(e).context(format!("cannot listen at {address}{remedy}"))
    })?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Answers requests from all listeners.
#[derive(Clone, Debug)]
pub struct Answers {
    access: Arc<Access>,
    routes: TowerToHyperService<Router>,
}

impl Answers {
    /// Creates the service for a TCP address, if there is one, and a state directory, if there is one, which then holds the key.
    ///
    /// # Errors
    /// If `web.yml` cannot be used or lacks what this address needs, or the state directory cannot hold the key.
    pub fn new(
        bound: Option<SocketAddr>,
        state: Option<&Path>,
        config: &Config,
        site: Site,
    ) -> anyhow::Result<Answers> {
        let access = Access::new(bound, state, (web_config(config), &site.feed))?;
        let access = Arc::new(access);
        Ok(Answers {
            routes: TowerToHyperService::new(router(site, &access)),
            access,
        })
    }

    /// Answers a request. Needs a tokio runtime with time enabled.
    pub fn answer(
        &self,
        came: Came,
        mut request: Request<Body>,
    ) -> impl Future<Output = Result<Response, Infallible>> + Send + use<> {
        request.extensions_mut().insert(came);
        self.routes.call(request)
    }
}

/// Open connections. TCP clients cannot take places of the socket's clients.
struct Doors {
    answers: Answers,
    readers: Readers,
    over_tcp: Room,
    over_socket: Room,
}

/// Connections of one listener.
struct Room {
    inside: VecDeque<AbortHandle>,
    inside_max: usize,
}

impl Doors {
    fn new(answers: Answers, readers: Readers) -> Doors {
        Doors {
            answers,
            readers,
            over_tcp: Room::new(),
            over_socket: Room::new(),
        }
    }

    async fn take_in(
        &mut self,
        tcp: Option<&tokio::net::TcpListener>,
        unix: Option<&tokio::net::UnixListener>,
    ) {
        loop {
            let (of_tcp, of_unix) = (
                OptionFuture::from(tcp.map(tokio::net::TcpListener::accept)),
                OptionFuture::from(unix.map(tokio::net::UnixListener::accept)),
            );
            tokio::select! {
                Some(guest) = of_tcp => match guest {
                    Ok((stream, from)) => self.take_in_tcp(stream, from.ip().to_canonical()),
                    Err(_) => tokio::time::sleep(KNOCK_AGAIN).await,
                },
                Some(guest) = of_unix => match guest {
                    Ok((stream, _)) => if let Some(role) = self.readers.role(&stream) {
                        self.over_socket.let_in(serve(self.answers.clone(), stream, Came::Socket(role)));
                    },
                    Err(_) => tokio::time::sleep(KNOCK_AGAIN).await,
                },
                else => return,
            }
        }
    }

    fn take_in_tcp(&mut self, stream: TcpStream, from: IpAddr) {
        let came = Came::Tcp(from);
        let answers = self.answers.clone();
        let Some(tls) = answers.access.tls() else {
            return self.over_tcp.let_in(serve(answers, stream, came));
        };
        self.over_tcp.let_in(async move {
            let agreed = TlsAcceptor::from(tls).accept(stream);
            if let Ok(Ok(stream)) = tokio::time::timeout(PATIENCE_TLS, agreed).await {
                serve(answers, stream, came).await;
            }
        });
    }
}

impl Room {
    fn new() -> Room {
        Room {
            inside: VecDeque::new(),
            inside_max: Part::Http.share(CONNECTIONS_MAX),
        }
    }

    /// Runs a connection; if there are too many, drops the oldest.
    fn let_in(&mut self, connection: impl Future<Output = ()> + Send + 'static) {
        self.inside.retain(|guest| !guest.is_finished());
        if self.inside.len() >= self.inside_max
            && let Some(oldest) = self.inside.pop_front()
        {
            oldest.abort();
        }
        self.inside.push_back(tokio::spawn(connection).abort_handle());
    }
}

/// Serves a client until it disconnects.
async fn serve(answers: Answers, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, came: Came) {
    let service = service_fn(move |request: Request<Incoming>| answers.answer(came, request.map(Body::new)));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_header_size(HEAD_MAX);
    // Errors of a misbehaving client are ignored.
    drop(http.serve_connection(TokioIo::new(stream), service).await);
}
