#!/usr/bin/env python3
"""A service that starts nginx or redis-server, which puts itself into the background with a session of its own.

When the server answers a client it prints a line with the pids that the server gives for itself:

    {"service": 4700, "nginx": [4711, 4712]}        the master and the process that answered
    {"service": 4700, "redis": [4711]}
"""

import argparse
import ctypes
import json
import os
import resource
import signal
import socket
import subprocess

# No file outside the prefix, no port: the socket and all else is there.
NGINX_CONF = """\
daemon on;
worker_processes 2;
pid nginx.pid;
error_log error.log;
events {}
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    server {
        listen unix:server.sock;
        location / { return 200 "$pid"; }
    }
}
"""


class Crash(Exception):
    """What nobody catches."""


class Changes:
    """Wakes when something in the directory changes, from the moment it is made."""

    # From <sys/inotify.h>.
    CLOSE_WRITE, CREATE = 0x8, 0x100

    def __init__(self, path):
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_CLOEXEC)
        if self.fd < 0 or libc.inotify_add_watch(self.fd, path.encode(), self.CLOSE_WRITE | self.CREATE) < 0:
            raise OSError(ctypes.get_errno(), "inotify", path)

    def wait(self):
        os.read(self.fd, 4096)


def connect(path):
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(path)
    except OSError:
        client.close()
        return None
    return client


def ask(client, question):
    with client:
        client.sendall(question)
        return client.makefile("r").readlines()


def start_nginx():
    with open("nginx.conf", "w") as conf:
        conf.write(NGINX_CONF)
    prefix = os.getcwd() + "/"
    subprocess.run(["nginx", "-p", prefix, "-c", "nginx.conf", "-e", "error.log"], check=True)
    # nginx listens before it goes into the background, and has written its pid before anybody can answer.
    answer = ask(connect("server.sock"), b"GET / HTTP/1.0\r\n\r\n")
    with open("nginx.pid") as file:
        return [int(file.read()), int(answer[-1])]


def start_redis():
    changes = Changes(".")
    subprocess.run(
        ["redis-server", "--daemonize", "yes", "--port", "0", "--unixsocket", "server.sock", "--save", "",
         "--pidfile", os.path.abspath("redis.pid"), "--logfile", "redis.log", "--dir", os.getcwd()],
        check=True, stdout=subprocess.DEVNULL)
    # redis-server listens only later; it writes to its log once more when it does.
    while not (client := connect("server.sock")):
        changes.wait()
    answer = ask(client, b"INFO server\r\nQUIT\r\n")
    return [int(line.split(":")[1]) for line in answer if line.startswith("process_id:")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", choices=("nginx", "redis"))
    parser.add_argument("--dir", required=True, help="where everything is written; of this run only")
    parser.add_argument("--then", choices=("wait", "crash", "abort", "exit"), default="wait",
                        help="what the service does when the server answers")
    options = parser.parse_args()

    # A user's PATH often does not look where nginx lives.
    os.environ["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"
    # A socket's path has to be short; relative to the directory it is.
    os.chdir(options.dir)
    pids = {"nginx": start_nginx, "redis": start_redis}[options.server]()
    print(json.dumps({"service": os.getpid(), options.server: pids}), flush=True)

    match options.then:
        case "crash":
            raise Crash("the server is up")
        case "abort":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
        case "wait":
            signal.pause()


if __name__ == "__main__":
    main()
