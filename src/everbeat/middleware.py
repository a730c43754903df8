"""The names for functions around the work of an app: resources and middleware."""

from everbeat.client.send_call import SendCall as SendCall
from everbeat.runtime.resources import Resource as Resource
