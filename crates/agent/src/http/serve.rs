//! Where clients come in: loopback, if it is asked for, and a socket beside the state for the agent's own user.

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
/// How long a client may take to say a request's head, and be silent between two.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most bytes of a request's head.
const HEAD_MAX: usize = 32 << 10;
/// Connections at one time, of the address and of the socket each; the one that came first makes room. Fewer where the process
/// may open less than 16 times as many files.
const CONNECTIONS_MAX: usize = 256;
/// Threads beside those for questions: passwords are checked on their own.
const PASSWORDS: usize = 1;
/// How long a client may take to agree on how to hide what is said. It counts as a connection meanwhile.
const PATIENCE_TLS: Duration = Duration::from_secs(10);
/// When to look again for clients that knocked while no more files could be opened.
const KNOCK_AGAIN: Duration = Duration::from_millis(50);
/// How long answers that are being made may take once the agent ends.
const END: Duration = Duration::from_secs(1);

/// The open server. Closing it ends all connections.
#[derive(Debug)]
pub struct HttpServer {
    path: Option<PathBuf>,
    url: Option<String>,
    /// Closes it where it is dropped.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    feed: Feed,
}

impl HttpServer {
    /// Opens it where anybody may ask: see [`HttpServer::open`].
    ///
    /// # Errors
    /// As there.
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

    /// Opens it: on loopback where that is asked for, and on a socket in the state directory where there is one.
    ///
    /// # Errors
    /// An address that is taken or may not be listened on; a state directory that cannot hold the socket.
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

    /// Where its page is, with the port that was free, and with what makes an operator of who opens it.
    pub fn url(&self) -> Option<String> {
        self.url.clone()
    }

    /// Where the loop publishes.
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

/// Whether it may be listened on there: looked at before anything is begun.
///
/// # Errors
/// With what is wrong, and the remedy.
pub fn check(listen_at: Option<Listen>, config: &Config) -> Result<(), String> {
    let Some(at) = listen_at else { return Ok(()) };
    let web = web_config(config).map(Web::read).transpose()?;
    web.unwrap_or_default().may_listen(at.address())
}

/// Where TLS and passwords are, if anywhere.
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

/// What answers a request, however it came in.
#[derive(Clone, Debug)]
pub struct Answers {
    access: Arc<Access>,
    routes: TowerToHyperService<Router>,
}

impl Answers {
    /// For what is listened on at an address, if any, and for a state directory, which then holds the key.
    ///
    /// # Errors
    /// A `web.yml` that cannot be used, or does not suffice for the address; a state directory that cannot hold the key.
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

    /// Answers a request, within a runtime of tokio with its clock.
    pub fn answer(
        &self,
        came: Came,
        mut request: Request<Body>,
    ) -> impl Future<Output = Result<Response, Infallible>> + Send + use<> {
        request.extensions_mut().insert(came);
        self.routes.call(request)
    }
}

/// Who is in. Whoever may knock at the address takes no room from those who may use the socket.
struct Doors {
    answers: Answers,
    readers: Readers,
    over_tcp: Room,
    over_socket: Room,
}

/// Connections that came in one way.
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

    /// Counts a connection, the oldest of which makes room.
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

/// Answers a client until it goes.
async fn serve(answers: Answers, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, came: Came) {
    let service = service_fn(move |request: Request<Incoming>| answers.answer(came, request.map(Body::new)));
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_header_size(HEAD_MAX);
    // A client that misbehaves is its own problem.
    drop(http.serve_connection(TokioIo::new(stream), service).await);
}
