//! Where clients come in: loopback, if it is asked for, and a socket beside the state for the agent's own user.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use futures_util::future::OptionFuture;
use homenode_api::http::Listen;
use homenode_api::remedy;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::process::{Resource, geteuid, getrlimit};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::{Site, THREADS, router};
use crate::feed::Feed;
use crate::server::listen;

/// The socket's name in the state directory.
const SOCKET: &str = "http.sock";
/// Its rights: whoever may write to it may read everything.
const SOCKET_MODE: u32 = 0o600;
/// How long a client may take to say a request's head, and be silent between two.
const PATIENCE: Duration = Duration::from_secs(30);
/// Most bytes of a request's head.
const HEAD_MAX: usize = 32 << 10;
/// Connections at one time; the one that came first makes room. Fewer where the process may open less than eight times as many
/// files.
const CONNECTIONS_MAX: usize = 512;
/// When to look again for clients that knocked while no more files could be opened.
const KNOCK_AGAIN: Duration = Duration::from_millis(50);
/// How long answers that are being made may take once the agent ends.
const END: Duration = Duration::from_secs(1);

/// The open server. Closing it ends all connections.
#[derive(Debug)]
pub struct HttpServer {
    bound: Option<SocketAddr>,
    path: Option<PathBuf>,
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
        site: Site,
    ) -> anyhow::Result<Option<HttpServer>> {
        let is_asked = state.is_some() || listen_at.is_some();
        is_asked
            .then(|| HttpServer::open(listen_at, state, site))
            .transpose()
    }

    /// Opens it: on loopback where that is asked for, and on a socket in the state directory where there is one.
    ///
    /// # Errors
    /// An address that is taken or may not be listened on; a state directory that cannot hold the socket.
    pub fn open(listen_at: Option<Listen>, state: Option<&Path>, site: Site) -> anyhow::Result<HttpServer> {
        let tcp = listen_at.map(tcp_listener).transpose()?;
        let bound = tcp.as_ref().map(TcpListener::local_addr).transpose()?;
        let path = state.map(|state| state.join(SOCKET));
        let unix = match (state, &path) {
            (Some(state), Some(path)) => Some(listen(state, path, SOCKET_MODE)?),
            _ => None,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(THREADS)
            .thread_name("http-work")
            .build()
            .context("cannot start the runtime that answers HTTP")?;
        let (stop, stopped) = oneshot::channel();
        let feed = site.feed.clone();
        let serving = async move {
            let mut doors = Doors::new();
            let (over_tcp, over_unix) = (router(site.clone(), bound), router(site, None));
            let tcp = tcp.and_then(|tcp| tokio::net::TcpListener::from_std(tcp).ok());
            let unix = unix.and_then(|unix| tokio::net::UnixListener::from_std(unix).ok());
            tokio::select! {
                _ = stopped => {}
                () = doors.take_in(tcp.as_ref(), &over_tcp, unix.as_ref(), &over_unix) => {}
            }
        };
        let named = std::thread::Builder::new().name("http".into());
        let thread = named.spawn(move || {
            runtime.block_on(serving);
            runtime.shutdown_timeout(END);
        });
        Ok(HttpServer {
            bound,
            path,
            stop: Some(stop),
            thread: Some(thread.context("cannot start the thread that answers HTTP")?),
            feed,
        })
    }

    /// Where it listens, with the port that was free.
    pub fn bound(&self) -> Option<SocketAddr> {
        self.bound
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

/// Who is in.
struct Doors {
    inside: VecDeque<AbortHandle>,
    inside_max: usize,
}

impl Doors {
    fn new() -> Doors {
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let share = usize::try_from(files / 8).unwrap_or(usize::MAX);
        Doors {
            inside: VecDeque::new(),
            inside_max: share.clamp(1, CONNECTIONS_MAX),
        }
    }

    async fn take_in(
        &mut self,
        tcp: Option<&tokio::net::TcpListener>,
        over_tcp: &Router,
        unix: Option<&tokio::net::UnixListener>,
        over_unix: &Router,
    ) {
        loop {
            let (of_tcp, of_unix) = (
                OptionFuture::from(tcp.map(tokio::net::TcpListener::accept)),
                OptionFuture::from(unix.map(tokio::net::UnixListener::accept)),
            );
            tokio::select! {
                Some(guest) = of_tcp => match guest {
                    Ok((stream, _)) => self.let_in(stream, over_tcp),
                    Err(_) => tokio::time::sleep(KNOCK_AGAIN).await,
                },
                Some(guest) = of_unix => match guest {
                    Ok((stream, _)) if is_own(&stream) => self.let_in(stream, over_unix),
                    Ok(_) => {}
                    Err(_) => tokio::time::sleep(KNOCK_AGAIN).await,
                },
                else => return,
            }
        }
    }

    fn let_in(&mut self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, routes: &Router) {
        self.inside.retain(|guest| !guest.is_finished());
        if self.inside.len() >= self.inside_max
            && let Some(oldest) = self.inside.pop_front()
        {
            oldest.abort();
        }
        let service = TowerToHyperService::new(routes.clone());
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(PATIENCE)
            .max_header_size(HEAD_MAX);
        let connection = http.serve_connection(TokioIo::new(stream), service);
        // A client that misbehaves is its own problem.
        let task = tokio::spawn(async move { drop(connection.await) });
        self.inside.push_back(task.abort_handle());
    }
}

/// Whether a client is root or the agent's user: the socket's rights say so too, unless somebody changed them.
fn is_own(stream: &tokio::net::UnixStream) -> bool {
    let peer = stream.peer_cred().map(|peer| peer.uid());
    peer.is_ok_and(|uid| uid == 0 || uid == geteuid().as_raw())
}
