#!/usr/bin/env python3
"""A service modelled on dcmanager, StarlingX's manager of subclouds.

It starts each playbook under `timeout`, in a session of its own, registers the group, and on SIGTERM sends
SIGTERM to every registered group and ends without waiting, as dcmanager does. What the groups do not hold (async
tasks and, from ansible-core 2.19, the workers) lives on: that is what supervise is for.

Each process that was made to last says its pid in a fifo. When all of a playbook have, the service prints a line

    {"service": 4700, "leader": [4711], "async": [4715, 4716], "background": [...], "plain": [...]}

so that a test knows when to strike, and whom to look for, without asking /proc. All files are below --dir.
"""

import argparse
import json
import os
import resource
import select
import signal
import subprocess
import sys

HOSTS = ("subcloud1", "subcloud2")

INVENTORY = "".join(f"{host} ansible_connection=local\n" for host in HOSTS)


def lasting(role):
    """Says its pid, then lasts. A line in the fifo is one write, so the lines of many writers do not mix."""
    return f"echo {{{{ playbook }}}} {role} $$ >> {{{{ fifo }}}}; exec sleep 1000"


PLAYBOOK = f"""\
- hosts: all
  gather_facts: false
  tasks:
    - name: in the background of ansible
      shell: "{lasting('async')}"
      async: 3600
      poll: 0
    - name: in the background of a shell
      shell: "nohup sh -c '{lasting('background')}' >/dev/null 2>&1 &"
    - name: what the playbook waits for
      shell: "{lasting('plain')}"
"""

# Besides the leader: on each host one process of each of the three tasks.
MEMBERS_OF_A_PLAYBOOK = 3 * len(HOSTS)

# In the place of ansible-playbook at a scale where real ones would take minutes: a leader that lives and four
# orphans, the last in a session of its own.
PRESTAGE = """\
orphan='echo "$0" orphan $$ >> "$1"; exec sleep 1000'
for way in '' '' '' setsid; do
    ($way sh -c "$orphan" "$1" "$2" &)
done
exec sleep 1000
"""
MEMBERS_OF_A_PRESTAGE = 4


class Crash(Exception):
    """What nobody catches."""


class Service:
    def __init__(self, options):
        self.options = options
        self.dir = os.path.abspath(options.dir)
        self.registered = {}
        self.members = {}
        self.missing = {}
        self.up = 0
        self.stop_asked = False

        self.fifo_path = os.path.join(self.dir, "members")
        os.mkfifo(self.fifo_path)
        # Read and write: no end of file while no playbook has it open.
        self.fifo = os.open(self.fifo_path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        # Signals come through a pipe, so that none can fall between the look and the wait.
        self.signals, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, self.ask_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)

        if options.ansible:
            self.write("ansible.cfg", "")
            self.write("inventory", INVENTORY)
            self.write("playbook.yml", PLAYBOOK)

    def write(self, name, text):
        with open(os.path.join(self.dir, name), "w") as file:
            file.write(text)

    def ask_stop(self, *_):
        self.stop_asked = True

    def environment(self):
        """Nothing of the user's Ansible comes in, and nothing is written outside the directory."""
        python = os.path.join(self.options.ansible, "bin", "python")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
        return inherited | {
            "PATH": os.pathsep.join([os.path.dirname(python), os.environ["PATH"]]),
            "LC_ALL": "C.UTF-8",
            "HOME": self.dir,
            "TMPDIR": self.dir,
            "ANSIBLE_CONFIG": os.path.join(self.dir, "ansible.cfg"),
            "ANSIBLE_HOME": os.path.join(self.dir, "ansible"),
            "ANSIBLE_LOCAL_TEMP": os.path.join(self.dir, "local"),
            "ANSIBLE_REMOTE_TEMP": os.path.join(self.dir, "remote"),
            "ANSIBLE_ASYNC_DIR": os.path.join(self.dir, "async"),
            "ANSIBLE_LOG_PATH": "/dev/null",
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_NOCOWS": "1",
            # Finding an interpreter costs a second on each host.
            "ANSIBLE_PYTHON_INTERPRETER": python,
        }

    def command(self, number):
        if not self.options.ansible:
            return ["sh", "-c", PRESTAGE, "prestage", str(number), self.fifo_path]
        return [
            "timeout", "--kill-after=5s", "3600s",
            os.path.join(self.options.ansible, "bin", "ansible-playbook"),
            "--inventory", "inventory",
            "--extra-vars", f"playbook={number} fifo={self.fifo_path}",
            # dcmanager passes passwords so.
            "--extra-vars", "ansible_become_pass=Hunter2*",
            "playbook.yml",
        ]

    def start(self, number):
        with open(self.log(number), "w") as log:
            playbook = subprocess.Popen(
                self.command(number),
                cwd=self.dir,
                env=self.environment() if self.options.ansible else None,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.registered[number] = playbook
        self.members[number] = {"service": os.getpid(), "leader": [playbook.pid]}
        self.missing[number] = MEMBERS_OF_A_PLAYBOOK if self.options.ansible else MEMBERS_OF_A_PRESTAGE

    def log(self, number):
        return os.path.join(self.dir, f"playbook-{number}.log")

    def run(self):
        for number in range(1, self.options.playbooks + 1):
            self.start(number)
        rest = b""
        while not self.stop_asked:
            readable, _, _ = select.select([self.fifo, self.signals], [], [])
            if self.signals in readable:
                os.read(self.signals, 4096)
                self.look_after_playbooks()
            if self.fifo in readable:
                *lines, rest = (rest + os.read(self.fifo, 65536)).split(b"\n")
                for line in lines:
                    number, role, pid = line.decode().split()
                    self.has_come(int(number), role, int(pid))
        self.shut_down()

    def has_come(self, number, role, pid):
        self.members[number].setdefault(role, []).append(pid)
        self.missing[number] -= 1
        if self.missing[number]:
            return
        print(json.dumps(self.members[number]), flush=True)
        self.up += 1
        if self.up == self.options.playbooks:
            self.all_are_up()

    def all_are_up(self):
        match self.options.then:
            case "crash":
                raise Crash("every playbook is up")
            case "abort":
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os.abort()
            case "exit":
                sys.exit(0)

    def look_after_playbooks(self):
        """No playbook ends by itself; one that does has failed, and whoever waits for it would wait for ever."""
        for number, playbook in self.registered.items():
            if playbook.poll() is not None and not self.stop_asked:
                with open(self.log(number)) as log:
                    sys.exit(f"playbook {number} ended with {playbook.returncode}:\n{log.read()}")

    def shut_down(self):
        for playbook in self.registered.values():
            if playbook.poll() is None:
                os.killpg(playbook.pid, signal.SIGTERM)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", required=True, help="where everything is written; of this run only")
    parser.add_argument("--ansible", metavar="VENV", help="the venv of ansible-core; without it, a shell plays ansible")
    parser.add_argument("--playbooks", type=int, default=2)
    parser.add_argument("--then", choices=("wait", "crash", "abort", "exit"), default="wait",
                        help="what the service does when every playbook is up")
    Service(parser.parse_args()).run()


if __name__ == "__main__":
    main()
